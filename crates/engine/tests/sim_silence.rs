//! A target that owes an answer for long: that is said, once, and nothing else happens.

mod nbd_dialer;

use blockmux_engine::initiator::RemoteVolume;
use blockmux_engine::listener::ConnectionLimit;
use blockmux_engine::sim::{SimCore, SimNet, Weather, World};
use blockmux_engine::socket::Address;
use blockmux_engine::target::TargetTask;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::nbd::initiator::Features;
use blockmux_proto::nbd::target::TargetSession;
use blockmux_volume::{Core, DelayVolume, Delays, Io, MemVolume, Op, ReadyList, Tag, Volume, VolumeInfo};
use nbd_dialer::NbdDialer;
use std::fmt::{self, Write};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

const SIZE: u64 = 1 << 20;

#[test]
fn a_target_that_owes_an_answer_is_told_of_once_and_not_left() {
    let said = Arc::new(Mutex::new(String::new()));
    let _guard = tracing::subscriber::set_default(Warnings(said.clone()));
    let mut world = World::new(SimNet::new(1, Weather::FAIR));
    let (client, target) = (world.add_core(16 << 20), world.add_core(16 << 20));
    let address = Address::Unix("/target".into());
    serve_slowly(&world, &target, &address, Duration::from_secs(600));
    let dialer = NbdDialer { address, features: Features::default() };
    let volume = RemoteVolume::<_, SimCore>::new(dialer, VolumeInfo::new(SIZE), 1, Duration::from_secs(5));
    let (core, ready): (Rc<dyn Core>, _) = (client, ReadyList::new());
    let mut channel = volume.open(&core, 4, ready.waker(0)).unwrap();
    // A connection that nobody uses owes nothing.
    world.run_for(Duration::from_secs(300)).unwrap();
    assert_eq!(*said.lock().unwrap(), "");
    channel.submit(Io::new(Tag(1), Op::Read, 0, 4096));
    channel.kick();
    world.run_for(Duration::from_secs(590)).unwrap();
    assert_eq!(said.lock().unwrap().matches("no answer for 60 s, 1 requests wait").count(), 1);
    world.run_for(Duration::from_secs(30)).unwrap();
    let mut done = Vec::new();
    channel.poll(&mut done);
    assert!(done.len() == 1 && done[0].result.is_ok(), "{done:?}");
    assert_eq!(said.lock().unwrap().lines().count(), 1, "{}", said.lock().unwrap());
    assert_eq!(world.net().connections().0, 1, "it was one connection all the time");
}

fn serve_slowly(world: &World, core: &Rc<SimCore>, address: &Address, delay: Duration) {
    let volume =
        DelayVolume::new(Arc::new(MemVolume::new(SIZE)), Delays { read: delay, ..Delays::default() });
    let export = Export {
        name: "disk0".to_owned(),
        description: String::new(),
        read_only: false,
        volume: Arc::new(volume),
    };
    let (exports, limit) = (Exports::new(vec![export]), ConnectionLimit::new(usize::MAX));
    world.net().listen(core, address, move |core, stream| {
        let session = TargetSession::new(exports.clone(), core.pool().clone(), core.now());
        let permit = limit.permit().expect("there is no limit");
        TargetTask::spawn(core, stream, session, exports.clone(), permit);
    });
}

/// Keeps every warning, a line each.
struct Warnings(Arc<Mutex<String>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut said = self.0.lock().expect("nobody panics with it");
        event.record(&mut Line(&mut said));
        said.push('\n');
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("a string takes all");
        }
    }
}
