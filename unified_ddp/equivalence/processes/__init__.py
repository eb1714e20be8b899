"""Sides in processes of their own, and sides that were recorded.

child       one child process: started, watched, always ended; the parent's half of it and its own
messages    values and arrays as npz, in files and over sockets
loading     a side from FILE.py:FUNCTION
worker      the program that a side's process runs
remote      a side whose program runs in a process
recording   a side whose answers are kept in a directory, and one that gives them again
"""
