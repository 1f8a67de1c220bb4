"""fleetdump: turn GPU hosts running SGLang into a fleet that writes hidden states.

This package's ``agent`` and ``worker`` parts also run on the hosts, so this file must import nothing and parse
on Python 3.8.
"""

__version__ = "0.1.0"
