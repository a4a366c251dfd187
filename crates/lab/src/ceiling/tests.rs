//! Tests of the ceiling over real sockets, and of messages split at every byte.

use super::flow::{Inflow, IoDirection, Lengths, Messages, Outflow, UnknownMessage};
use super::*;
use crate::result::{Direction, Run};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

const SHAPE: MessageShape =
    MessageShape { read_request: 28, read_reply_head: 16, write_request_head: 29, write_reply: 17 };
const VARIANTS: [Variant; 2] = [Variant::Sleeping, Variant::Spinning];
const TRANSPORTS: [Transport; 2] = [Transport::Tcp, Transport::Unix];

fn job(rw: Rw, bs: u32, iodepth: u32, connections: u32) -> CeilingJob {
    let job = Job { rw, bs, iodepth, numjobs: connections, rwmixread: 70, ..Job::default() };
    CeilingJob {
        data_bytes: 8 << 20,
        ramp: Duration::from_millis(5),
        runtime: Duration::from_millis(40),
        ..CeilingJob::new(&job, SHAPE, Variant::Sleeping)
    }
}

/// Runs the job in all variants over all transports, and calls `check` on each run. On a busy
/// machine a run may have no completion; it is then repeated with a longer runtime.
fn run_all(job: &CeilingJob, expected: &[IoDirection], check: impl Fn(&Run)) {
    let data = Data::new(job.data_bytes).unwrap();
    for variant in VARIANTS {
        for transport in TRANSPORTS {
            let mut job = CeilingJob { variant, transport, ..job.clone() };
            let mut run = run_over(&job, &data).unwrap();
            while expected.iter().any(|&kind| direction(&run, kind).ios == 0) {
                job.runtime *= 4;
                assert!(job.runtime < Duration::from_secs(60), "no run has a completion");
                run = run_over(&job, &data).unwrap();
            }
            assert!(run.runtime_ns >= job.runtime.as_nanos() as u64);
            assert_eq!((run.errors, run.verify_errors, &run.trim), (0, 0, &Direction::default()));
            for kind in [IoDirection::Read, IoDirection::Write] {
                let direction = direction(&run, kind);
                assert_eq!(direction.ios > 0, expected.contains(&kind));
                assert_eq!(direction.bytes, direction.ios * u64::from(job.bs));
                assert_eq!(direction.ios > 0, direction.latency.max_ns > 0);
            }
            assert!(
                run.target_cpu_ns.is_some_and(|ns| ns > 0) && run.initiator_cpu_ns.is_some_and(|ns| ns > 0)
            );
            check(&run);
        }
    }
}

fn direction(run: &Run, kind: IoDirection) -> &Direction {
    if kind == IoDirection::Read { &run.read } else { &run.write }
}

const READS: &[IoDirection] = &[IoDirection::Read];
const WRITES: &[IoDirection] = &[IoDirection::Write];
const BOTH: &[IoDirection] = &[IoDirection::Read, IoDirection::Write];

#[test]
fn reads_of_all_depths_complete() {
    for iodepth in [1, 32, 300] {
        run_all(&job(Rw::RandRead, 4096, iodepth, 1), READS, |_| ());
    }
}

#[test]
fn writes_of_all_depths_complete() {
    for iodepth in [1, 32, 300] {
        run_all(&job(Rw::Write, 4096, iodepth, 1), WRITES, |_| ());
    }
}

#[test]
fn a_mix_has_about_the_requested_share_of_reads() {
    run_all(&job(Rw::RandRw, 512, 64, 1), BOTH, |run| {
        let share = run.read.ios as f64 / run.ios() as f64;
        // Ten standard deviations of this many draws.
        let margin = 10.0 * (0.7 * 0.3 / run.ios() as f64).sqrt();
        assert!((share - 0.7).abs() < margin, "{share} of {}", run.ios());
    });
}

#[test]
fn several_connections_share_the_two_threads() {
    run_all(&job(Rw::ReadWrite, 4096, 16, 5), BOTH, |_| ());
}

#[test]
fn messages_larger_than_the_socket_buffer_are_continued() {
    run_all(&job(Rw::Read, 1 << 20, 32, 1), READS, |_| ());
    run_all(&job(Rw::Write, 1 << 20, 32, 1), WRITES, |_| ());
    run_all(&job(Rw::RandRw, 1 << 20, 32, 2), BOTH, |_| ());
}

#[test]
fn both_ends_have_the_requested_congestion_control() {
    let reno: Congestion = "reno".parse().unwrap();
    let job = CeilingJob { congestion: Some(reno.clone()), ..job(Rw::Read, 4096, 1, 2) };
    let (servers, clients) = sockets::connect(&job).unwrap();
    for socket in servers.iter().chain(&clients) {
        assert_eq!(Congestion::of(socket), Some(reno.clone()));
    }
}

#[test]
fn with_a_pacing_congestion_control_the_send_buffers_are_those_of_the_engine() {
    let bbr: Congestion = "bbr".parse().unwrap();
    let job = CeilingJob { congestion: Some(bbr), ..job(Rw::Read, 4096, 1, 2) };
    let Ok((servers, clients)) = sockets::connect(&job) else {
        println!("skipped: no bbr here, or not for everybody");
        return;
    };
    for socket in servers.iter().chain(&clients) {
        let bytes = rustix::net::sockopt::socket_send_buffer_size(socket).unwrap();
        assert_eq!(bytes, blockmux_engine::net::socket::PACED_BUFFER);
    }
}

#[test]
fn threads_may_be_pinned_to_cpus() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpu = (0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let job = CeilingJob { server_cpu: cpu, client_cpu: cpu, ..job(Rw::Read, 4096, 8, 1) };
    run_all(&job, READS, |_| ());
}

#[test]
fn a_side_that_cannot_start_ends_the_other_one() {
    for variant in VARIANTS {
        for (server_cpu, client_cpu) in [(Some(100_000), None), (None, Some(100_000))] {
            let runtime = Duration::from_secs(3600);
            let job = CeilingJob { variant, server_cpu, client_cpu, runtime, ..job(Rw::Read, 4096, 8, 2) };
            let error = run(&job).unwrap_err();
            assert!(matches!(error, CeilingError::Pin { cpu: 100_000, .. }), "{error}");
            assert!(error.to_string().lines().count() == 1);
        }
    }
}

#[test]
fn invalid_jobs_are_refused() {
    let good = job(Rw::Read, 4096, 1, 1);
    let refused = [
        CeilingJob { rw: Rw::RandTrim, ..good.clone() },
        CeilingJob { bs: 0, ..good.clone() },
        CeilingJob { iodepth: MAX_IODEPTH + 1, ..good.clone() },
        CeilingJob { connections: 0, ..good.clone() },
        CeilingJob { runtime: Duration::ZERO, ..good.clone() },
        CeilingJob { rwmixread: 101, ..good.clone() },
        CeilingJob { data_bytes: 4095, ..good.clone() },
        CeilingJob { shape: MessageShape { write_reply: 0, ..SHAPE }, ..good.clone() },
    ];
    for job in refused {
        assert!(matches!(run(&job), Err(CeilingError::Job(_))), "{job:?}");
    }
}

#[test]
fn messages_are_counted_for_any_split_of_the_stream() {
    let lengths = Lengths { read: 3, write: 8 };
    let stream = [&b"r.."[..], b"w.......", b"w.......", b"r..", b"r"].concat();
    for cut in 0..=stream.len() {
        let (mut inflow, mut seen) = (Inflow::new(), Vec::new());
        for part in [&stream[..cut], &stream[cut..]] {
            inflow.walk(part, lengths, |kind| seen.push(kind)).unwrap();
        }
        assert_eq!(
            seen,
            [IoDirection::Read, IoDirection::Write, IoDirection::Write, IoDirection::Read],
            "{cut}"
        );
    }
    assert_eq!(Inflow::new().walk(b"r..x", lengths, |_| ()), Err(UnknownMessage));
}

#[test]
fn a_slow_peer_receives_exactly_the_queued_bytes() {
    let (server, mut client) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&server, 4096).unwrap();
    server.set_nonblocking(true).unwrap();
    client.set_nonblocking(true).unwrap();
    let server = OwnedFd::from(server);
    let (depth, bs) = (400, 1000);
    let (reads, writes) = (IoDirection::Read.heads(7, depth), IoDirection::Write.heads(5, depth));
    let data: Vec<u8> = (0..251).cycle().take(10 * bs).collect();
    let mut replies = Messages::new(IoDirection::Read, (&reads, 7), (&writes, 5), &data, bs);
    let (mut outflow, mut expected) = (Outflow::new(depth), Vec::new());
    for nth in 0..depth {
        // Headers alone, headers with data, and more segments than one call takes.
        if nth % 7 < 3 {
            outflow.push(IoDirection::Write, 0);
            expected.extend_from_slice(b"w\0\0\0\0");
        } else {
            let at = nth % 10 * bs;
            outflow.push(IoDirection::Read, at);
            expected.extend_from_slice(b"r\0\0\0\0\0\0");
            expected.extend_from_slice(&data[at..at + bs]);
        }
    }
    let (mut got, mut buffer, mut rounds) = (Vec::new(), [0; 777], 0);
    while got.len() < expected.len() {
        replies.send(&server, &mut outflow).unwrap();
        // Reads little in each round: the socket is nearly always full, and messages are split
        // everywhere.
        let bytes = client.read(&mut buffer).unwrap();
        got.extend_from_slice(&buffer[..bytes]);
        rounds += 1;
    }
    assert!(outflow.is_empty() && got == expected && rounds > 100);
}
