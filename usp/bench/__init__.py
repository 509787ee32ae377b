"""python -m usp.bench: how fast each strategy, and each peer, is against one process on one thread.

rounds.py times, ideal.py says what to expect, contenders.py and peers.py make what is compared,
sheet.py prints.
"""
