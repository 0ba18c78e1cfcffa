"""What errors of single runs say to do, said of an entry of a fleet."""

from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.recipe.fields import fields_for


def remedy_of(error: EnginesmithError) -> str:
    """What to do about an error; options, which all entries get, are named as fields of the fleet file, too."""
    fields = fields_for(str(error))
    if not fields:
        return error.remedy
    said = f"an option is for all entries: in the fleet file, `recipe: {{{', '.join(fields)}}}` is for one model"
    return "; ".join(filter(None, [error.remedy, said]))
