/* A library with the name of MediaTek's Neuron adapter and without its contents.
 *
 * LiteRT's plugin for MediaTek has its own list of operators and types. It does not read this list before
 * it has loaded `libneuron_adapter.so` and asked that library for a version. This file is that library:
 * it answers with a version, and with nothing else.
 *
 * It has no compiler, supports no operator, declines no operator, and runs nothing. `partitioner.py` asks
 * for the plugin's own list (`--mediatek_use_get_supported_operations=false`), so that no other function is
 * called. It is built into a temporary folder for each question, and is never a part of a bundle.
 *
 * Source of the signature: google-ai-edge/LiteRT, litert/vendors/mediatek/neuron_adapter_api.cc,
 * GetNeuronVersion; a NeuronRuntimeVersion has three bytes: major, minor, patch.
 */

#define NEURON_NO_ERROR 0

typedef struct {
  unsigned char major;
  unsigned char minor;
  unsigned char patch;
} NeuronRuntimeVersion;

int Neuron_getVersion(NeuronRuntimeVersion *version) {
  version->major = 8;
  version->minor = 0;
  version->patch = 10;
  return NEURON_NO_ERROR;
}
