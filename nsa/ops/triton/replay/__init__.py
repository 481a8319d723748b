"""Replay: calls are recorded once for their form, and repeated from then on.

Sizes, keys, views and allocations of a short call take the host longer than its kernels take the
GPU, and none of them depends on data. So the first call of a form is recorded (recorder.py): which
kernels it launches, and where their pointers lie. Later calls allocate the results and one
workspace, and launch (tape.py). calls.py decides which calls those are.
"""
