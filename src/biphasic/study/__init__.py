"""Studies: many pretraining runs whose shared beginnings are trained once."""
