"""Steps that several commands share: flags, devices, processes, saved runs."""
