"""Target for AWS Inferentia2 and Trainium: modules that Neuron's tracer compiles, compiler, and runtime."""

# Words that no file outside of this folder contains, besides the folder's name; a test checks it.
VENDOR_WORDS = ("inferentia", "trainium", "inf2", "trn1", "trn2", "neuronx", "neff")
