"""A Dagster job whose steps append, each in a process of its own: a module it can import."""

import dagster as dg

from support.appending import append_from_fields


@dg.op(config_schema=dict)
def append(context: dg.OpExecutionContext) -> None:
    config = context.op_config
    append_from_fields(config["fields"], config["table"], config["first"], config["first"] + 100)


@dg.job(executor_def=dg.multiprocess_executor)
def appending() -> None:
    append.alias("one")()
    append.alias("two")()
