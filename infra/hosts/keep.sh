#!/bin/sh
# Keep one role alive where no service manager does:  sh keep.sh ROLE CONFIG... [OPTIONS]
# Starts `rlstreams worker` again as its exit status asks (infra/docs/operating.md): 0, 76 and 78
# end it, 75 is followed by one more start per ten minutes, anything else by starts with back-off.
set -u
role=$1
pause_s=1
fenced_at_s=-600
child=
asked=
trap 'asked=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
say() { echo "keep.sh: $role $1" >&2; }

while [ -z "$asked" ]; do
    begun_s=$(date +%s)
    rlstreams worker "$@" &
    child=$!
    wait "$child"
    status=$?
    # A signal ends the wait, not the worker, which drains first.
    while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
    child=
    now_s=$(date +%s)
    case $status in
    0) exit 0 ;;
    76 | 78) say "ended with $status and is not started again" && exit "$status" ;;
    75)
        [ $((now_s - fenced_at_s)) -ge 600 ] ||
            { say "was fenced twice within ten minutes: two supervisors run it" && exit 75; }
        fenced_at_s=$now_s
        ;;
    esac
    [ -z "$asked" ] || exit "$status"
    [ $((now_s - begun_s)) -lt 60 ] || pause_s=1
    say "ended with $status and is started again in $pause_s s"
    sleep "$pause_s" &
    child=$!
    wait "$child"
    child=
    pause_s=$((pause_s * 2))
    [ "$pause_s" -le 30 ] || pause_s=30
done
