"""The search: domains, tables, bounds, the CP-SAT model, ranking and conflicts. OR-Tools is imported here only."""
