"""What answers the cells of a sweep: processes of this machine, or an engine that starts them on others. One
loop asks them all, and asks again about a cell that an engine lost.
"""
# pyright: reportUnusedImport=false

from harness.sweep.launchers.launcher import Question, RemoteLauncher, outcomes
from harness.sweep.launchers.named import launcher_named
