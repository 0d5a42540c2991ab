"""Ways to log in to Kafka."""

import dagster as dg

from dagster_bq_connector import KafkaSource

sources = [
    KafkaSource(
        bootstrap_servers="kafka.example.com:9093",
        topic="shop.public.orders",
        user="dagster",
        password=dg.EnvVar("KAFKA_PASSWORD"),
        sasl_mechanism="SCRAM-SHA-512",
        ca_file="/etc/kafka/ca.pem",
    ),
    KafkaSource(
        bootstrap_servers="kafka.example.com:9093",
        topic="shop.public.orders",
        security_protocol="SSL",
        ca_file="/etc/kafka/ca.pem",
        settings={
            "ssl.certificate.location": "/etc/kafka/client.pem",
            "ssl.key.location": "/etc/kafka/client.key",
        },
    ),
]
