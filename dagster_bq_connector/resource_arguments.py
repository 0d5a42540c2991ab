"""Functions that take resources by names which are known only when they are made.

Dagster finds the resources of an asset or a sensor in the function's signature, and hands over the
resources themselves. Under `required_resource_keys` it would hand over what each makes of itself:
of a BigQuery resource a client.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import dagster as dg
import dagster_gcp

from dagster_bq_connector.cdc_sources import CdcSource

Function = TypeVar("Function", bound=Callable[..., Any])


def taking(function: Function, bigquery: str, sources: Iterable[str], **others: Any) -> Function:
    """Give a function that takes keywords the signature that Dagster looks at.

    Args:
        function: Takes what stands in `others`, and the resources as keywords.
        bigquery: The key of the BigQuery resource.
        sources: The keys of sources of changes.
        others: The other parameters and their types, in their order.
    """
    types = {**others, bigquery: dg.ResourceParam[dagster_gcp.BigQueryResource]}
    types |= dict.fromkeys(sorted(sources), dg.ResourceParam[CdcSource])
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given: Any = function
    given.__signature__ = inspect.Signature(
        [inspect.Parameter(name, place, annotation=kind) for name, kind in types.items()]
    )
    given.__annotations__ = types
    return function
