"""Functions that damage a valid file, as an attacker, a faulty disk or another program might do."""
