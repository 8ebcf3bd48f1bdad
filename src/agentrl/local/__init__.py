"""Wing: a run on one machine: the embedded mongod, the local engine, launch, quickstart, plan, doctor."""
