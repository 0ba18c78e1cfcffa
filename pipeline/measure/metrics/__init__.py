"""Compute task metrics by name, from one output and its labels; the axis of samples comes first.

What a library that people trust has, it computes: torchmetrics, pycocotools, jiwer and seqeval, which the extra
``metrics`` has.
"""
