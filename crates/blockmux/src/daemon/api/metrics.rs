//! Metrics in the OpenMetrics text format.
//!
//! Each core has its own counters; they are read and summed for each request. The number of series
//! is bounded by [`MAX_VOLUMES`] and [`MAX_SESSIONS`]; beyond them only a count is exported.

use super::process::Process;
use crate::daemon::control::{ControlServer, Snapshot, VolumeCounters};
use crate::output::printable;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::volume_state::{ERROR_KINDS, LATENCY_BUCKETS, LatencyHistogram, VolumeTraffic};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// The media type of the text that [`render`] returns.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a daemon, as text.
pub(super) fn render(control: &ControlServer) -> String {
    let mut registry = Registry::default();
    registry.register(
        "blockmux_build",
        "Version of the daemon",
        Info::new([("version", env!("CARGO_PKG_VERSION"))]),
    );
    registry.register_collector(Box::new(DaemonCollector {
        snapshot: control.snapshot(),
        process: Process::read(),
    }));
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

/// The metrics of one request.
struct DaemonCollector {
    snapshot: Snapshot,
    process: Process,
}

impl fmt::Debug for DaemonCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DaemonCollector")
    }
}

type Labels<'a> = Vec<(&'static str, &'a str)>;

impl Collector for DaemonCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Output(encoder);
        self.connections(&mut out)?;
        self.volumes(&mut out)?;
        self.group(&mut out)?;
        self.disks(&mut out)?;
        self.throttling(&mut out)?;
        self.latencies(&mut out)?;
        self.sessions(&mut out)?;
        self.cores(&mut out)?;
        self.process(&mut out)
    }
}

impl DaemonCollector {
    fn connections(&self, out: &mut Output<'_>) -> fmt::Result {
        let Snapshot { status, listeners, .. } = &self.snapshot;
        out.single(
            "blockmux_connections",
            "Open connections",
            None,
            ConstGauge::new(status.connections as f64),
        )?;
        let limit = status.max_connections as f64;
        out.single(
            "blockmux_connections_limit",
            "Maximum number of open connections",
            None,
            ConstGauge::new(limit),
        )?;
        let help = "Closed connections whose I/O has not ended";
        out.single("blockmux_orphaned_connections", help, None, ConstGauge::new(status.orphaned as f64))?;
        let of = |value: fn(&blockmux_engine::serve::listener::ListenerState) -> u64| {
            listeners.iter().map(move |(protocol, listener)| {
                (vec![("protocol", *protocol), ("listener", listener.address())], value(listener))
            })
        };
        let open = of(|listener| listener.open() as u64).map(|(labels, value)| (labels, value as f64));
        out.gauge("blockmux_listener_connections", "Open connections of a listener", None, open)?;
        let help = "Connections that a listener has accepted";
        out.counter("blockmux_listener_accepted", help, None, of(|listener| listener.accepted()))?;
        let help = "Connections refused because of a limit, their address or a lack of memory";
        out.counter("blockmux_listener_refused", help, None, of(|listener| listener.refused()))
    }

    fn group(&self, out: &mut Output<'_>) -> fmt::Result {
        let Some(group) = &self.snapshot.group else { return Ok(()) };
        let up = group.members.iter().filter(|member| member.state == "up").count();
        let unserved = group.volumes.iter().filter(|volume| volume.state != "active").count();
        let decides = group.decides.as_ref() == Some(&group.member);
        for (name, help, value) in [
            ("blockmux_group_joined", "Whether the daemon belongs to its group", usize::from(group.joined)),
            ("blockmux_group_decides", "Whether the daemon decides for its group", usize::from(decides)),
            ("blockmux_group_members_up", "Gateways of the group that are up and heard", up),
            ("blockmux_group_volumes", "Volumes of the group", group.volumes.len()),
            (
                "blockmux_group_volumes_unserved",
                "Volumes of the group that start or move, or that nobody serves",
                unserved,
            ),
        ] {
            out.single(name, help, None, ConstGauge::new(value as f64))?;
        }
        Ok(())
    }

    /// The volumes that have their own series.
    fn shown(&self) -> &[VolumeCounters] {
        let all = &self.snapshot.volumes;
        &all[..all.len().min(MAX_VOLUMES)]
    }

    fn volumes(&self, out: &mut Output<'_>) -> fmt::Result {
        out.single(
            "blockmux_volumes",
            "Exported volumes",
            None,
            ConstGauge::new(self.snapshot.volumes.len() as f64),
        )?;
        let help = "Exported volumes without their own series";
        let left_out = (self.snapshot.volumes.len() - self.shown().len()) as f64;
        out.single("blockmux_volumes_not_shown", help, None, ConstGauge::new(left_out))?;
        let gauge = |value: fn(&VolumeCounters) -> Option<f64>| {
            self.shown()
                .iter()
                .filter_map(move |one| Some((vec![("volume", one.name.as_str())], value(one)?)))
        };
        out.gauge(
            "blockmux_volume_size",
            "Size of a volume",
            Some(Unit::Bytes),
            gauge(|one| Some(one.size as f64)),
        )?;
        let help = "Requests of a volume in flight";
        out.gauge("blockmux_volume_queue_depth", help, None, gauge(|one| Some(one.queue_depth() as f64)))?;
        let help = "Connections that use a volume";
        out.gauge("blockmux_volume_users", help, None, gauge(|one| Some(one.users() as f64)))?;
        let help = "Closed connections whose I/O on a volume has not ended";
        out.gauge(
            "blockmux_volume_orphaned_connections",
            help,
            None,
            gauge(|one| Some(one.orphaned as f64)),
        )?;
        let help = "Registrations of persistent reservations";
        let registrants = gauge(|one| Some(one.reservation.registrants as f64));
        out.gauge("blockmux_volume_registrants", help, None, registrants)?;
        let help = "Whether an initiator has reserved a volume";
        let reserved = gauge(|one| Some(f64::from(u8::from(one.reservation.is_reserved))));
        out.gauge("blockmux_volume_reserved", help, None, reserved)?;
        let help = "Whether this daemon serves a volume that several daemons serve in turns";
        let active = gauge(|one| one.is_active.map(|is_active| f64::from(u8::from(is_active))));
        out.gauge("blockmux_volume_active", help, None, active)?;
        let help = "Memory of a RAM volume that is faulted in";
        let populated = gauge(|one| one.populated.map(|bytes| bytes as f64));
        out.gauge("blockmux_volume_populated", help, Some(Unit::Bytes), populated)?;
        let links = self
            .shown()
            .iter()
            .filter_map(|one| Some((vec![("volume", one.name.as_str())], one.reconnects?)));
        let help = "Reconnects to the server of a remote volume";
        out.counter("blockmux_volume_reconnects", help, None, links)?;
        let help = "Requests of a volume";
        out.counter(
            "blockmux_volume_requests",
            help,
            None,
            self.by_origin("kind", |traffic| {
                vec![("read", traffic.reads), ("write", traffic.writes), ("other", traffic.others)]
            }),
        )?;
        let help = "Bytes read and written by requests of a volume";
        out.counter(
            "blockmux_volume_data",
            help,
            Some(Unit::Bytes),
            self.by_origin("direction", |traffic| {
                vec![("read", traffic.read_bytes), ("written", traffic.written_bytes)]
            }),
        )?;
        let failures = self.shown().iter().flat_map(|one| {
            let failures = ERROR_KINDS.iter().zip(one.failures()).filter(|(_, count)| *count > 0);
            failures.map(move |(kind, count)| (vec![("volume", one.name.as_str()), ("error", *kind)], count))
        });
        out.counter("blockmux_volume_failures", "Requests of a volume that failed", None, failures)
    }

    fn disks(&self, out: &mut Output<'_>) -> fmt::Result {
        let disks = self.snapshot.disks.iter().map(|disk| (disk, disk.device.as_ref()));
        let disks: Vec<_> = disks
            .map(|(disk, device)| {
                let (path, way) = device
                    .map_or((String::new(), ""), |own| (own.path.display().to_string(), own.way.name()));
                (disk.volume.as_str(), path, way, f64::from(u8::from(disk.state == "attached")))
            })
            .collect();
        let rows = disks.iter().take(MAX_VOLUMES).map(|(volume, path, way, is_attached)| {
            (vec![("volume", *volume), ("device", path.as_str()), ("via", *way)], *is_attached)
        });
        let help = "Whether a volume with an attachment is a disk of this machine";
        out.gauge("blockmux_attachment_attached", help, None, rows)
    }

    fn throttling(&self, out: &mut Output<'_>) -> fmt::Result {
        let rows = |value: fn(&VolumeTraffic) -> u64| {
            let all = self.shown().iter();
            all.map(move |one| (vec![("volume", one.name.as_str())], one.throttled(value)))
        };
        let pending = in_floats(rows(|traffic| traffic.throttled_now));
        let help = "Requests that limits throttle now";
        out.gauge("blockmux_volume_throttled_requests_pending", help, None, pending)?;
        let help = "Requests that limits have throttled";
        out.counter("blockmux_volume_throttled_requests", help, None, rows(|traffic| traffic.throttled))?;
        let help = "Time for which throttled requests have waited";
        let time = rows(|traffic| traffic.throttled_ns);
        let time = time.map(|(labels, ns)| (labels, ns as f64 / NS_PER_SECOND));
        out.counter("blockmux_volume_throttled", help, Some(Unit::Seconds), time)
    }

    /// A row for each volume, listener and value of `label`.
    fn by_origin<'a>(
        &'a self,
        label: &'static str,
        values: impl Fn(&VolumeTraffic) -> Vec<(&'static str, u64)> + Copy + 'a,
    ) -> impl Iterator<Item = (Labels<'a>, u64)> {
        let origins = self.shown().iter().flat_map(|one| one.origins.iter().map(move |origin| (one, origin)));
        origins.flat_map(move |(one, sum)| {
            let labels = vec![
                ("volume", one.name.as_str()),
                ("protocol", sum.origin.protocol),
                ("listener", &*sum.origin.listener),
            ];
            let row = move |(word, value)| ([labels.clone(), vec![(label, word)]].concat(), value);
            values(&sum.traffic).into_iter().map(row)
        })
    }

    fn latencies(&self, out: &mut Output<'_>) -> fmt::Result {
        let rows = self.shown().iter().flat_map(|one| {
            let latency = one.latency();
            let kinds = latency.by_kind().map(|(kind, histogram)| (kind, *histogram));
            let used = kinds.into_iter().filter(|(_, histogram)| histogram.count() > 0);
            used.map(move |(kind, histogram)| {
                (vec![("volume", one.name.as_str()), ("kind", kind)], histogram)
            })
        });
        out.histogram("blockmux_volume_latency", "Latency of requests of a volume", rows)
    }

    fn sessions(&self, out: &mut Output<'_>) -> fmt::Result {
        let all = &self.snapshot.sessions;
        let mut by_protocol: BTreeMap<&str, u64> = BTreeMap::new();
        all.iter().for_each(|session| *by_protocol.entry(session.login.protocol).or_default() += 1);
        let counts =
            by_protocol.iter().map(|(protocol, count)| (vec![("protocol", *protocol)], *count as f64));
        out.gauge("blockmux_sessions", "Logged-in sessions", None, counts)?;
        // Connections of one process over a Unix socket have the same labels and are summed.
        let mut sums: BTreeMap<[&str; 4], VolumeTraffic> = BTreeMap::new();
        for SessionInfo { login, peer, traffic, .. } in all {
            let key = [login.protocol, login.initiator.as_str(), login.target.as_str(), peer.as_str()];
            let sum = sums.entry(key).or_default();
            *sum = sum.plus(*traffic);
        }
        let left_out = sums.len().saturating_sub(MAX_SESSIONS) as f64;
        let help = "Sessions without their own series";
        out.single("blockmux_sessions_not_shown", help, None, ConstGauge::new(left_out))?;
        let rows = |label: &'static str, values: fn(&VolumeTraffic) -> Vec<(&'static str, u64)>| {
            let shown = sums.iter().take(MAX_SESSIONS);
            shown.flat_map(move |([protocol, initiator, target, address], traffic)| {
                let names = ["protocol", "initiator", "target", "address"];
                let labels: Labels<'_> =
                    names.into_iter().zip([*protocol, *initiator, *target, *address]).collect();
                let row = move |(word, value)| ([labels.clone(), vec![(label, word)]].concat(), value);
                values(traffic).into_iter().map(row)
            })
        };
        let requests = rows("kind", |traffic| {
            vec![("read", traffic.reads), ("write", traffic.writes), ("other", traffic.others)]
        });
        out.counter("blockmux_session_requests", "Requests of a session", None, requests)?;
        let bytes = rows("direction", |traffic| {
            vec![("read", traffic.read_bytes), ("written", traffic.written_bytes)]
        });
        out.counter("blockmux_session_data", "Bytes read and written by a session", Some(Unit::Bytes), bytes)
    }

    fn cores(&self, out: &mut Output<'_>) -> fmt::Result {
        let names: Vec<String> = (0..self.snapshot.cores.len()).map(|nth| nth.to_string()).collect();
        let rows = |value: fn(&blockmux_engine::core::reactor::CoreStats) -> u64| {
            let all = names.iter().zip(&self.snapshot.cores);
            all.map(move |(name, core)| (vec![("core", name.as_str())], value(core)))
        };
        let help = "Rounds of a core's event loop that did work";
        out.counter("blockmux_core_turns", help, None, rows(|core| core.turns()))?;
        out.counter(
            "blockmux_core_spins",
            "Rounds of a core's event loop that found no work",
            None,
            rows(|core| core.spins()),
        )?;
        out.counter("blockmux_core_sleeps", "How often a core slept", None, rows(|core| core.sleeps()))?;
        let bytes = in_floats(rows(|core| core.buffer_bytes()));
        out.gauge("blockmux_core_buffers", "Buffers of a core in use", Some(Unit::Bytes), bytes)?;
        let limits = in_floats(rows(|core| core.buffer_limit_bytes()));
        out.gauge(
            "blockmux_core_buffers_limit",
            "Maximum size of a core's buffers",
            Some(Unit::Bytes),
            limits,
        )
    }

    fn process(&self, out: &mut Output<'_>) -> fmt::Result {
        let Process { cpu_seconds, resident, virtual_memory, open_files, max_files, threads, started } =
            self.process;
        let (bytes, seconds, gauge) = (Some(Unit::Bytes), Some(Unit::Seconds), ConstGauge::<f64>::new);
        out.single("process_cpu", "CPU time of the daemon", seconds.clone(), ConstCounter::new(cpu_seconds))?;
        out.single("process_resident_memory", "Resident memory", bytes.clone(), gauge(resident))?;
        out.single("process_virtual_memory", "Address space", bytes, gauge(virtual_memory))?;
        out.single("process_open_fds", "Open file descriptors", None, gauge(open_files))?;
        out.single("process_max_fds", "Limit of open file descriptors", None, gauge(max_files))?;
        out.single("process_threads", "Threads", None, gauge(threads))?;
        out.single("process_start_time", "Start time since the Unix epoch", seconds, gauge(started))
    }
}

/// Converts the values of rows for gauges.
fn in_floats<'a>(rows: impl Iterator<Item = (Labels<'a>, u64)>) -> impl Iterator<Item = (Labels<'a>, f64)> {
    rows.map(|(labels, value)| (labels, value as f64))
}

/// Labels as they are written: names of clients may have characters that must not be printed.
fn shown<'a>(labels: &Labels<'a>) -> Vec<(&'static str, Cow<'a, str>)> {
    labels.iter().map(|&(name, value)| (name, printable(value))).collect()
}

/// Writes metric families.
struct Output<'a>(DescriptorEncoder<'a>);

impl Output<'_> {
    /// A metric without labels.
    fn single(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        metric: impl EncodeMetric,
    ) -> fmt::Result {
        let encoder = self.0.encode_descriptor(name, help, unit.as_ref(), metric.metric_type())?;
        metric.encode(encoder)
    }

    fn gauge<'l>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        rows: impl IntoIterator<Item = (Labels<'l>, f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        rows.into_iter().try_for_each(|(labels, value)| {
            ConstGauge::new(value).encode(family.encode_family(&shown(&labels))?)
        })
    }

    fn counter<'l, N: prometheus_client::encoding::EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        rows: impl IntoIterator<Item = (Labels<'l>, N)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        rows.into_iter().try_for_each(|(labels, value)| {
            ConstCounter::new(value).encode(family.encode_family(&shown(&labels))?)
        })
    }

    fn histogram<'l>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Labels<'l>, LatencyHistogram)>,
    ) -> fmt::Result {
        let unit = Unit::Seconds;
        let mut family = self.0.encode_descriptor(name, help, Some(&unit), MetricType::Histogram)?;
        for (labels, histogram) in rows {
            let bounds = (0..LATENCY_BUCKETS).map(LatencyHistogram::bound_ns);
            let seconds = bounds.map(|bound| bound.map_or(f64::INFINITY, |ns| ns as f64 / NS_PER_SECOND));
            let buckets: Vec<_> = seconds.zip(histogram.buckets).collect();
            let sum = histogram.sum_ns as f64 / NS_PER_SECOND;
            let labels = shown(&labels);
            let mut metric = family.encode_family(&labels)?;
            metric.encode_histogram::<NoLabelSet>(sum, histogram.count(), &buckets, None)?;
        }
        Ok(())
    }
}

const NS_PER_SECOND: f64 = 1e9;
/// Maximum number of volumes with their own series.
const MAX_VOLUMES: usize = 1024;
/// Maximum number of sessions with their own series.
const MAX_SESSIONS: usize = 256;
