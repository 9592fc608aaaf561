"""What tests of other rooms take from inside `cli`."""

from gpu_actors.cli.first_hour import Finding, FirstHour, examine, judge_cases, write_bundle, write_page
