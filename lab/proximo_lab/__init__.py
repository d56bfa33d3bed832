"""The laboratory: studies, benchmarks, faults, parity, journeys and experiments around Proximo."""
