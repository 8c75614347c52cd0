"""Results as text. Tables, CSV and JSON are all made from the JSON of a result, fresh or saved."""
