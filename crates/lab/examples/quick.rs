#![allow(missing_docs, clippy::print_stdout)]
use blockmux_engine::cores::*;
use blockmux_engine::listener::*;
use blockmux_engine::nbd;
use blockmux_engine::reactor::PollPolicy;
use blockmux_engine::socket::*;
use blockmux_lab::ceiling::*;
use blockmux_lab::generator::Bench;
use blockmux_lab::job::*;
use blockmux_lab::result::Run;
use blockmux_proto::exports::*;
use blockmux_volume::*;
use std::sync::Arc;
use std::time::Duration;
fn main() {
    let policies: Vec<PollPolicy> = match std::env::args().nth(1).as_deref() {
        Some("never") => vec![PollPolicy::Never],
        Some("adaptive") => vec![PollPolicy::ADAPTIVE],
        Some("always") => vec![PollPolicy::Always],
        _ => vec![PollPolicy::Never, PollPolicy::ADAPTIVE, PollPolicy::Always],
    };
    let ms: u64 = std::env::args().nth(2).map_or(500, |s| s.parse().unwrap());
    let only: Option<usize> = std::env::args().nth(3).and_then(|s| s.parse().ok());
    let reps: usize = std::env::args().nth(4).map_or(3, |s| s.parse().unwrap());
    let mem: Arc<dyn Volume> =
        Arc::new(MemVolume::from_pages(blockmux_engine::memory::map_pages(1 << 30).unwrap()));
    let data = Data::new(1 << 30).unwrap();
    let exports = Exports::new(vec![Export {
        name: "disk0".into(),
        description: String::new(),
        read_only: false,
        volume: mem.clone(),
    }]);
    {
        let init =
            Cores::start(&CoresConfig { pin_from: Some(1), policy: PollPolicy::Never, ..Default::default() })
                .unwrap();
        let fill = Job { rw: Rw::Write, bs: 1 << 20, iodepth: 8, runtime_ms: 1500, ..Job::default() };
        Bench {
            job: &fill,
            volume: &mem,
            own_buffers: true,
            initiator: &init,
            target: None,
            progress: &|_| {},
        }
        .run()
        .unwrap();
    }
    let rows = [
        (Rw::RandRead, 4096, 1, 1),
        (Rw::RandRead, 4096, 32, 1),
        (Rw::RandRead, 4096, 128, 1),
        (Rw::RandRead, 4096, 32, 4),
        (Rw::RandWrite, 4096, 1, 1),
        (Rw::RandWrite, 4096, 32, 1),
        (Rw::RandWrite, 4096, 128, 1),
        (Rw::RandRead, 65536, 32, 1),
        (Rw::RandWrite, 65536, 32, 1),
        (Rw::Read, 1 << 20, 8, 1),
        (Rw::Write, 1 << 20, 8, 1),
    ];
    let shape =
        MessageShape { read_request: 32, read_reply_head: 40, write_request_head: 32, write_reply: 32 };
    for (i, (rw, bs, iodepth, numjobs)) in rows.into_iter().enumerate() {
        if only.is_some_and(|o| o != i) {
            continue;
        }
        let job = Job { rw, bs, iodepth, numjobs, runtime_ms: ms, ramp_time_ms: 100, ..Job::default() };
        let mut results: Vec<(String, Vec<Run>)> = vec![("sleep".into(), vec![]), ("spin".into(), vec![])];
        for p in &policies {
            results.push((p.name().into(), vec![]));
        }
        for _ in 0..reps {
            for (n, v) in [(0, Variant::Sleeping), (1, Variant::Spinning)] {
                let cj = CeilingJob {
                    server_cpu: Some(0),
                    client_cpu: Some(1),
                    ..CeilingJob::new(&job, shape, v)
                };
                results[n].1.push(run_over(&cj, &data).unwrap());
            }
            for (n, policy) in policies.iter().enumerate() {
                let target =
                    Cores::start(&CoresConfig { pin_from: Some(0), policy: *policy, ..Default::default() })
                        .unwrap();
                let init =
                    Cores::start(&CoresConfig { pin_from: Some(1), policy: *policy, ..Default::default() })
                        .unwrap();
                let l = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
                let addr = l.address().clone();
                let inboxes = target.inboxes();
                let exports = exports.clone();
                target.ask(0, move |core| {
                    ListenerTask::spawn(core, l, inboxes, nbd::serve(exports), ConnectionLimit::new(1000))
                });
                let vol: Arc<dyn Volume> = Arc::new(
                    nbd::connect(nbd::Endpoint {
                        address: addr,
                        export: "disk0".into(),
                        connections: 1,
                        patience: Duration::from_secs(5),
                    })
                    .unwrap(),
                );
                results[2 + n].1.push(
                    Bench {
                        job: &job,
                        volume: &vol,
                        own_buffers: false,
                        initiator: &init,
                        target: Some(&target),
                        progress: &|_| {},
                    }
                    .run()
                    .unwrap(),
                );
            }
        }
        println!("{rw:?} {bs} d{iodepth} x{numjobs}");
        for (name, mut runs) in results {
            runs.sort_by(|a, b| a.iops().total_cmp(&b.iops()));
            let run = &runs[runs.len() / 2];
            let d = if run.read.ios > 0 { &run.read } else { &run.write };
            println!(
                "  {name:8} {:8.0} IOPS {:7.0} MB/s mean {:6.1} us p99 {:6.1} tcpu {:.2} icpu {:.2} err {}  [{:.0}..{:.0}]",
                run.iops(),
                run.bytes_per_second() / 1e6,
                d.latency.mean_ns / 1e3,
                d.latency.percentiles[12].1 as f64 / 1e3,
                run.target_cpu_ns.unwrap_or(0) as f64 / 1e3 / run.ios().max(1) as f64,
                run.initiator_cpu_ns.unwrap_or(0) as f64 / 1e3 / run.ios().max(1) as f64,
                run.errors,
                runs[0].iops(),
                runs[runs.len() - 1].iops()
            );
        }
    }
}
