//! A listener whose RDMA device has its TCP port, too. No machine of the tests has such a device,
//! so a listener over RoCEv2 has its TCP socket taken away.

use super::daemon::TestPlace;
use super::{lines, reload};

#[test]
fn a_listener_whose_fabric_has_the_tcp_port_keeps_it_and_a_change_is_refused() {
    let place = TestPlace::new().with_clients(false);
    let config = |parameters: &str, volumes: &str| {
        let at = format!("{}:3261{parameters}", place.ip());
        format!("iscsi = ['{at}']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{volumes}")
    };
    place.write(&config("?rdma=roce", ""));
    let daemon = place.start().unwrap();
    let reloader = &daemon.control.reloader;
    let fabric = || reloader.policy.listeners()[0].fabric.map(|fabric| fabric.name);
    {
        let mut changing = reloader.begin_change();
        let own = &mut changing.listeners[0];
        own.end.end();
        own.accepting = None;
        reloader.publish(&changing, (*reloader.config.get()).clone());
    }
    let served = daemon.snapshot();
    for parameters in ["", "?rdma=verbs"] {
        place.write(&config(parameters, ""));
        let refused = reload(&daemon, &served).unwrap_err().to_string();
        assert!(refused.contains("3261: an RDMA device has this TCP port, "), "{refused}");
        assert_eq!(fabric(), Some("roce"));
    }
    // Other changes find it as it was.
    place.write(&config("?rdma=roce", "[[volume]]\nname = 'b'\nspec = 'mem:1m'\n"));
    let report = reload(&daemon, &served).unwrap();
    assert_eq!((lines(&report).len(), fabric()), (1, Some("roce")));
    assert!(reloader.begin_change().listeners[0].rdma_end.is_some());
    // Removing the listener gives the port back.
    place.write(&config("", "").replace("3261", "3262"));
    daemon.reload().unwrap();
    place.write(&config("", ""));
    assert_eq!(daemon.reload().unwrap().warnings, [""; 0]);
    assert!(reloader.begin_change().listeners[0].accepting.is_some());
    daemon.stop();
    place.check_files();
}
