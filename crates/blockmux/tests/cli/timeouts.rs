//! `login_timeout` and `idle_timeout` of the config.

use crate::raw_client::RawClient;
use crate::raw_nvme::RawNvme;
use crate::reload::Configured;
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

const HOST: &str = "nqn.2026-11.test:host.of.ours";

fn config(timeouts: &str) -> String {
    format!(
        "nbd = ['unix:a.sock', '127.0.0.1:0']\niscsi = ['127.0.0.1:0']\nnvme_tcp = ['127.0.0.1:0']\n{timeouts}\n\
         [[volume]]\nname = 'a'\nspec = 'mem:8m'\n"
    )
}

#[test]
fn a_connection_that_does_not_log_in_is_closed_and_the_log_says_why() {
    let mut served = Configured::serve(&config("login_timeout = 1"));
    let iscsi = served.daemon.urls_of("iscsi").remove(0);
    let address = iscsi.split('/').nth(2).unwrap();
    let mut silent = TcpStream::connect(address).unwrap();
    assert!(matches!(silent.read(&mut [0]), Ok(0) | Err(_)));
    let mut nbd = UnixStream::connect(served.socket("a.sock")).unwrap();
    let mut greeting = Vec::new();
    let _ = nbd.read_to_end(&mut greeting);
    assert_eq!(greeting.len(), 18, "the server sent only the greeting");
    for _ in 0..2 {
        served.daemon.wait_for_line("login refused: peer did not log in within `login_timeout`");
    }
    // A client that has logged in stays connected.
    let mut client = served.nbd("a.sock");
    let mut silent = TcpStream::connect(address).unwrap();
    assert!(matches!(silent.read(&mut [0]), Ok(0) | Err(_)));
    assert_eq!(client.read(0, 512), [0; 512]);
}

#[test]
fn a_client_without_requests_is_disconnected_and_the_log_says_why() {
    let mut served = Configured::serve(&config(""));
    let mut idle = served.nbd("a.sock");
    let [mut admin, mut queue] = RawNvme::controller(&served.daemon.nvme_place(), HOST);
    assert_eq!((idle.read(0, 512), queue.write(0, &[1; 4096], false)), (vec![0; 512], 0));
    // The timeout takes effect at once.
    assert_eq!(served.reload(&config("idle_timeout = 5")), "+ idle_timeout: 5\n");
    assert!(idle.is_closed());
    assert_eq!((admin.status(), queue.status()), (None, None), "both queues of the host");
    served.daemon.wait_for_line("logout: it was idle for `idle_timeout`");
    // A client with requests stays connected while an idle one is disconnected.
    let (mut busy, url) = (served.nbd("a.sock"), served.daemon.urls_of("nbd").remove(0));
    let address = url.split('/').nth(2).unwrap().to_owned();
    let waits = std::thread::spawn(move || RawClient::over(TcpStream::connect(address).unwrap()).is_closed());
    while !waits.is_finished() {
        assert_eq!(busy.read(0, 512).len(), 512);
        std::thread::park_timeout(std::time::Duration::from_millis(20));
    }
    assert!(waits.join().unwrap());
    assert_eq!(busy.read(0, 512).len(), 512);
}
