"""Compile a bundle's programs with vendors' compilers: quantize, compile, run, update the bundle."""
