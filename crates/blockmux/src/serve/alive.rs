//! Whether all cores live: a daemon with a dead one would take connections and leave them without
//! an answer.

use super::StopEvent;
use blockmux_engine::cores::Cores;
use blockmux_engine::reactor::{EngineCore, Progress, Task};
use std::rc::Rc;
use std::sync::mpsc::Sender;

/// Makes an event of a core that ends before it is asked to.
pub(super) fn watch(cores: &Cores, events: &Sender<StopEvent>) {
    for nth in 0..cores.count() {
        let sender = events.clone();
        let spawned = cores.ask(nth, move |core| {
            core.spawn(|_| Alive { core: core.clone(), events: sender });
        });
        if spawned.is_none() {
            // It has ended already.
            let _ = events.send(StopEvent::CoreEnded);
        }
    }
}

/// Lives as long as its core, which drops its tasks however it ends.
struct Alive {
    core: Rc<EngineCore>,
    events: Sender<StopEvent>,
}

impl Task for Alive {
    fn run(&mut self) -> Progress {
        if self.core.is_stopping() { Progress::Done } else { Progress::Idle }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        if !self.core.is_stopping() {
            // The daemon may be ending for another reason.
            let _ = self.events.send(StopEvent::CoreEnded);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_engine::cores::CoresConfig;
    use std::sync::mpsc;
    use std::time::Duration;

    struct Panics;
    impl Task for Panics {
        fn run(&mut self) -> Progress {
            panic!("as a fault of ours would")
        }
    }

    #[test]
    fn a_core_that_panics_is_heard_of_and_one_that_is_stopped_is_not() {
        for panics in [true, false] {
            let cores = Cores::start(&CoresConfig { count: 2, ..CoresConfig::default() }).unwrap();
            let (sender, events) = mpsc::channel();
            watch(&cores, &sender);
            drop(sender);
            if panics {
                cores.ask(1, |core| core.spawn(|_| Panics));
            } else {
                assert!(cores.stop(Duration::from_secs(10)));
            }
            let heard = events.recv_timeout(Duration::from_secs(10));
            assert_eq!(matches!(heard, Ok(StopEvent::CoreEnded)), panics);
        }
    }
}
