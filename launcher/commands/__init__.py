"""One module for each command: ``add_to`` declares its arguments, ``run`` does it.

Modules here import quickly: no torch and no Ray before a command needs them.
"""
