"""Rules for data from outside and for files that must survive; standard library only.

Every package may import this folder. It is copied to hosts together with the hang collector.
"""
