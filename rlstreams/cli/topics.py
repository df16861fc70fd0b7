"""`rlstreams topics apply|list CONFIG...`: the topics of a run on its broker."""

from __future__ import annotations

import argparse

from rlstreams.cli.arguments import Commands, add_config, add_run, command, configuration


def add(subparsers: Commands) -> None:
    """Register the command."""
    parser = subparsers.add_parser("topics", help="create or list the topics of a run")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    apply = """create missing topics, lengthen retention; refuse other partition counts

        rlstreams topics apply run.toml --broker.bootstrap=10.0.0.5:9092
        """
    add_config(command(actions, "apply", run, apply))
    listed = """each topic with partitions, records, writers and readers

        Exit status 1 if a topic is missing.

        rlstreams topics list runs/demo
        """
    add_run(command(actions, "list", run, listed))


def run(args: argparse.Namespace) -> int:
    """Do it; `list` answers 1 if a topic is missing."""
    from rlstreams.streams.kafka.admin import apply, listing
    from rlstreams.streams.kafka.facts import TopicFacts
    from rlstreams.streams.log.topics import TOPICS
    from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options, place_of, topic_plan

    config = configuration(args.config, args.overrides)
    options = client_options(config)
    if args.action == "apply":
        bootstrap = bootstrap_of(config)
        created = apply(bootstrap, config.run.id, topic_plan(config), options)
        print("\n".join(f"created {name}" for name in created) or "nothing was missing")
        return 0
    with place_of(config).served() as bootstrap:
        there = listing(bootstrap, config.run.id, options)
    print(f"{'topic':<20} partitions replicas    records  key          written by -> read by")
    for topic in TOPICS:
        found = there.get(topic.name, TopicFacts(partitions=0, settings={}))
        replicas = min((len(one.assigned) for one in found.copies.values()), default=0)
        print(
            f"{topic.name:<20} {found.partitions or 'missing':>10} {replicas:>8} "
            f"{found.num_records:>10}  {topic.key:<12} "
            f"{', '.join(topic.written_by)} -> {', '.join(topic.read_by)}"
        )
    return 0 if len(there) == len(TOPICS) else 1
