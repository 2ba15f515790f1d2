"""Functions that damage a valid file in a way that an attacker, a bad disk or another program would."""
