#![allow(missing_docs, clippy::print_stdout)]
use blockmux_engine::cores::*;
use blockmux_engine::listener::*;
use blockmux_engine::nbd;
use blockmux_engine::reactor::PollPolicy;
use blockmux_engine::socket::*;
use blockmux_lab::generator::Bench;
use blockmux_lab::job::*;
use blockmux_proto::exports::*;
use blockmux_volume::*;
use std::sync::Arc;
use std::time::Duration;
fn main() {
    let policy = match std::env::args().nth(1).as_deref() {
        Some("never") => PollPolicy::Never,
        Some("adaptive") => PollPolicy::ADAPTIVE,
        _ => PollPolicy::Always,
    };
    let ms: u64 = std::env::args().nth(2).map_or(1000, |s| s.parse().unwrap());
    let only: Option<usize> = std::env::args().nth(3).map(|s| s.parse().unwrap());
    let mem: Arc<dyn Volume> =
        Arc::new(MemVolume::from_pages(blockmux_engine::memory::map_pages(1 << 30).unwrap()));
    let target = Cores::start(&CoresConfig { pin_from: Some(0), policy, ..Default::default() }).unwrap();
    let init = Cores::start(&CoresConfig { pin_from: Some(1), policy, ..Default::default() }).unwrap();
    let exports = Exports::new(vec![Export {
        name: "disk0".into(),
        description: String::new(),
        read_only: false,
        volume: mem.clone(),
    }]);
    let l = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
    let addr = l.address().clone();
    let inboxes = target.inboxes();
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
    println!("{:?}", vol.info());
    // fill
    let fill = Job { rw: Rw::Write, bs: 1 << 20, iodepth: 8, runtime_ms: 700, ..Job::default() };
    for v in [&mem] {
        Bench {
            job: &fill,
            volume: v,
            own_buffers: true,
            initiator: &init,
            target: Some(&target),
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
    for (i, (rw, bs, iodepth, numjobs)) in rows.into_iter().enumerate() {
        if only.is_some_and(|o| o != i) {
            continue;
        }
        for (name, v, own) in [("nbd", &vol, false), ("mem", &mem, true)] {
            if only.is_some() && name == "mem" {
                continue;
            }
            let job = Job { rw, bs, iodepth, numjobs, runtime_ms: ms, ramp_time_ms: 200, ..Job::default() };
            let run = Bench {
                job: &job,
                volume: v,
                own_buffers: own,
                initiator: &init,
                target: Some(&target),
                progress: &|_| {},
            }
            .run()
            .unwrap();
            let d = if run.read.ios > 0 { &run.read } else { &run.write };
            println!(
                "{name:4} {rw:?} {bs} d{iodepth} x{numjobs}: {:8.0} IOPS {:7.0} MB/s mean {:6.1} us p99 {:6.1} tcpu {:.2} icpu {:.2} err {}",
                run.iops(),
                run.bytes_per_second() / 1e6,
                d.latency.mean_ns / 1e3,
                d.latency.percentiles[12].1 as f64 / 1e3,
                run.target_cpu_ns.unwrap_or(0) as f64 / 1e3 / run.ios().max(1) as f64,
                run.initiator_cpu_ns.unwrap_or(0) as f64 / 1e3 / run.ios().max(1) as f64,
                run.errors
            );
        }
    }
}
