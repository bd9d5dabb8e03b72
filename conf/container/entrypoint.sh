#!/usr/bin/env bash
# Runs `sharding` with the arguments of the container. Spark on Kubernetes starts its containers with the argument `driver`
# or `executor`, and all else in environment variables: the contract of the images that Spark's own distribution builds.
set -euo pipefail

need() {
    local name
    for name in "$@"; do
        if [ -z "${!name:-}" ]; then
            echo "error: $name is not set: Spark on Kubernetes sets it; for a command of your own, give its name first" >&2
            exit 2
        fi
    done
}

# A user by number, as of `docker run --user` or OpenShift, has no name, without which Spark's JVMs do not start.
if ! id -un >/dev/null 2>&1 && NSS_WRAPPER_PASSWD=$(mktemp); then
    export NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP=/etc/group LD_PRELOAD=libnss_wrapper.so
    { cat /etc/passwd && echo "user$(id -u):x:$(id -u):$(id -g)::${HOME:-/tmp}:/bin/false"; } >"$NSS_WRAPPER_PASSWD"
fi

case "${1:-}" in
driver)
    shift
    need SPARK_DRIVER_BIND_ADDRESS
    exec "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
        --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
        --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" "$@"
    ;;
executor)
    shift
    need SPARK_DRIVER_URL SPARK_EXECUTOR_ID SPARK_EXECUTOR_CORES SPARK_EXECUTOR_MEMORY SPARK_APPLICATION_ID \
        SPARK_EXECUTOR_POD_IP SPARK_EXECUTOR_POD_NAME SPARK_RESOURCE_PROFILE_ID
    # Spark numbers the options of the JVM: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 ...
    options=()
    for name in $(compgen -e SPARK_JAVA_OPT_ | sort -V); do options+=("${!name}"); done
    classes="$SPARK_HOME/jars/*"
    # In front, as in Spark's own images. SPARK_CLASSPATH has spark.executor.extraClassPath.
    for each in "${SPARK_EXTRA_CLASSPATH:-}" "${SPARK_CLASSPATH:-}" "${SPARK_CONF_DIR:-}" "${HADOOP_CONF_DIR:-}"; do
        if [ -n "$each" ]; then classes="$each:$classes"; fi
    done
    exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" ${options[@]+"${options[@]}"} \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$classes" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME" "$@"
    ;;
spark-submit)
    shift
    exec "$SPARK_HOME/bin/spark-submit" "$@"
    ;;
*)
    exec sharding "$@"
    ;;
esac
