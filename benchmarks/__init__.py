"""Programs that measure: the hardware programme (gpu.py), peers, speed. None is imported by harness."""
