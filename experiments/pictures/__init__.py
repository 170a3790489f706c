"""Pictures of fields on points: truth, prediction and error."""
