"""TRL's configurations: every field with its default and what it is here, checks, and what whet's sections they make.

    field.py -> training.py supervised.py    tables of fields that several have
             -> grpo.py rloo.py sft.py dpo.py reward.py    a configuration's own fields, then its class

arguments.py is the base of the classes, rl.py and supervised.py what those of a kind have in common.
"""
