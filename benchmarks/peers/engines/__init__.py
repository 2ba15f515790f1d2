"""Every speech recognizer that is compared: one module each, with one class `Engine`.

A module imports its package when it is imported, and nothing else that takes time, so that the import can
be measured. All decode English greedily, at temperature 0 only, without the text of previous windows.

    Engine(folder, threads, mode)   loads the model that `convert.py` wrote to the folder
    .window(audio, tokens)          decodes this number of tokens in one window of 30 s; returns the number
    .transcribe(audios)             returns the text of each array of samples, float32 at 16 kHz
"""
