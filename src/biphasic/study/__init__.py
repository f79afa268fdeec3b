"""Studies: many pretraining runs that train their shared beginnings once."""
