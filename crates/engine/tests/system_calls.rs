//! The filter of system calls, which applies to the whole process: so this is a program with one
//! test.

use blockmux_engine::sys::syscall_filter::deny_unused;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket};
use rustix::thread::set_no_new_privs;
use std::net::{TcpListener, ToSocketAddrs};
use std::process::Command;
use std::sync::mpsc;
use std::thread;

#[test]
fn no_thread_can_start_a_program_or_a_process_or_make_unused_kinds_of_sockets() {
    let (go, start) = mpsc::channel();
    let earlier = thread::spawn(move || {
        start.recv().unwrap();
        Command::new("true").status().map_err(|error| error.raw_os_error())
    });
    assert!(Command::new("true").status().unwrap().success(), "before the filter");
    set_no_new_privs(true).unwrap();
    if let Err(error) = deny_unused() {
        println!("skipped: the kernel has no filters of system calls: {error}");
        return;
    }
    go.send(()).unwrap();
    let denied = Some(Errno::PERM.raw_os_error());
    assert_eq!(earlier.join().unwrap().unwrap_err(), denied, "a thread that was started before");
    let later = thread::spawn(|| Command::new("true").status().map_err(|error| error.raw_os_error()));
    assert_eq!(later.join().unwrap().unwrap_err(), denied, "threads can be started");
    let algorithms = AddressFamily::from_raw(libc::AF_ALG as u16);
    assert_eq!(socket(algorithms, SocketType::SEQPACKET, None).unwrap_err(), Errno::AFNOSUPPORT);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(listener.local_addr().unwrap().port() > 0);
    assert!(("localhost", 1).to_socket_addrs().is_ok_and(|mut all| all.next().is_some()));
    assert_eq!(rustix::process::chroot("/").unwrap_err(), Errno::PERM);
    assert!(std::fs::read_to_string("/proc/self/status").unwrap().contains("Seccomp:\t2\n"));
}
