"""The attack suite: mutated files of every format, each given to the function that a user would call.

`python -m fuzz` runs a campaign; see README.md in this folder. Linux only: it reads /proc and uses inotify.
"""
