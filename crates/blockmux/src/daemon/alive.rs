//! Detects cores that end unexpectedly. A daemon with a dead core would accept connections and
//! never serve them.

use super::DaemonEvent;
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::{EngineCore, Progress, Task};
use std::rc::Rc;
use std::sync::mpsc::Sender;

/// Sends [`DaemonEvent::CoreEnded`] when a core ends before it is stopped.
pub(super) fn watch(cores: &Cores, events: &Sender<DaemonEvent>) {
    for nth in 0..cores.count() {
        let sender = events.clone();
        let spawned = cores.ask(nth, move |core| {
            core.spawn(|_| Alive { core: core.clone(), events: sender });
        });
        if spawned.is_none() {
            // The core has already ended.
            let _ = events.send(DaemonEvent::CoreEnded);
        }
    }
}

/// A task that exists as long as its core: a core drops its tasks when it ends, also by a panic.
struct Alive {
    core: Rc<EngineCore>,
    events: Sender<DaemonEvent>,
}

impl Task for Alive {
    fn run(&mut self) -> Progress {
        if self.core.is_stopping() { Progress::Done } else { Progress::Idle }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        if !self.core.is_stopping() {
            // The receiver is gone if the daemon stops for another reason.
            let _ = self.events.send(DaemonEvent::CoreEnded);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_engine::core::cores::CoresConfig;
    use std::sync::mpsc;
    use std::time::Duration;

    struct Panics;
    impl Task for Panics {
        fn run(&mut self) -> Progress {
            panic!("injected by a test")
        }
    }

    #[test]
    fn a_core_that_panics_is_reported_and_one_that_is_stopped_is_not() {
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
            let event = events.recv_timeout(Duration::from_secs(10));
            assert_eq!(matches!(event, Ok(DaemonEvent::CoreEnded)), panics);
        }
    }
}
