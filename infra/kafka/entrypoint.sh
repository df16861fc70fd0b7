#!/bin/sh
# One node of Apache Kafka, told by environment variables as the image apache/kafka is:
# KAFKA_NODE_ID becomes node.id, CLUSTER_ID names the cluster. Uses nothing but the shell and Java.
set -eu
CONFIG=/opt/kafka/config
DEFAULTS=/etc/kafka/docker # for a container without a single KAFKA_ setting of a server property
java() {
    exec /opt/java/bin/java -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError -XX:-UsePerfData \
        $KAFKA_HEAP_OPTS ${KAFKA_OPTS:-} -cp '/opt/kafka/libs/*' "$@"
}

# The environment of a container never changes: what its first start wrote still holds.
if [ ! -f $CONFIG/formatted ]; then
    : "${CLUSTER_ID:?the same for all nodes: 16 bytes in URL-safe base64}"
    said=$(
        java -Dlog4j2.configurationFile=$DEFAULTS/log4j2.yaml \
            kafka.docker.KafkaDockerWrapper setup --default-configs-dir $DEFAULTS \
            --mounted-configs-dir /mnt/shared/config --final-configs-dir $CONFIG 2>&1
    ) || case $said in
        *"already formatted"*) ;; # the volume of an earlier container
        *) echo "$said" >&2 && exit 1 ;;
    esac
    : >$CONFIG/formatted
fi
java -Dlog4j2.configurationFile=$CONFIG/log4j2.yaml kafka.Kafka $CONFIG/server.properties
