"""XNNPACK through ExecuTorch: operators and limits, lowering, and running."""
