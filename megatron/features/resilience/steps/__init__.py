"""Steps that are judged: spikes, faulty ranks, slow ranks, copies that differ."""
