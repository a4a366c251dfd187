//! One guest: a kernel in QEMU that runs one script and powers off.
//!
//! A guest has two serial ports. The kernel's console goes to a file next to the log. The other
//! port is the script's standard output, where lines that begin with `@` are commands: `@check
//! SENTENCE`, `@host COMMAND` (in base64; its status is sent back), and `@end STATUS`.

use super::boot;
use super::host::{Host, lines_of};
use super::kernel::Kernel;
use super::log::Log;
use super::source::KernelSource;
use crate::process::succeed;
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Parameters of a guest.
pub(crate) struct Guest<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) image: &'a Path,
    /// Directory of programs that take precedence in the host's PATH.
    pub(crate) programs: &'a Path,
    pub(crate) log: &'a Path,
}

/// Result of a script.
pub(crate) struct ScriptResult {
    /// Number of checks that passed.
    pub(crate) checks: usize,
    pub(crate) passed: bool,
    /// Why the script has no end, and in which check, if that may be a fault of the emulator.
    pub(crate) no_end: Option<String>,
}

impl Guest<'_> {
    /// Runs `script` and reports the result of each check.
    ///
    /// # Errors
    /// If QEMU cannot be run.
    pub(crate) fn run(&self, script: &str, say: &mut dyn FnMut(&str)) -> Result<ScriptResult> {
        let log = Arc::new(Log::create(self.log)?);
        let addresses = Addresses::of_this_process();
        let mut host = Host::new(self.programs, addresses.environment(), log.clone())?;
        let (reader, writer) = std::io::pipe()?;
        let source = KernelSource::of(script);
        if source.is_disk() {
            let disk = host.directory().join("disk.img");
            boot::build(self.kernel, self.image, &parameters(script, &addresses), &disk)?;
        }
        if !source.is_network() {
            source.serve(&mut host)?;
        }
        let mut qemu = self.qemu(script, &addresses);
        // Scripts name files of the test to the monitor, and so to QEMU.
        qemu.current_dir(host.directory());
        qemu.arg("-monitor").arg(format!("unix:{},server=on,wait=off", host.monitor().display()));
        qemu.stdin(Stdio::piped()).stdout(writer.try_clone()?).stderr(writer);
        let mut child = qemu.spawn().context("cannot run QEMU")?;
        // Closes the pipe's write end, so that the reader sees when QEMU ends.
        drop(qemu);
        if source.is_network() {
            // QEMU has created the interfaces, and waits until it is told to continue.
            host.await_monitor()?;
            source.serve(&mut host)?;
            ensure!(host.execute("monitor cont") == 0, "QEMU does not continue");
        }
        let mut answers = child.stdin.take().context("standard input is a pipe")?;
        let (mut checks, mut status, mut is_begun) = (Checks::new(script, say), None, false);
        for line in lines_of(reader) {
            match GuestLine::parse(&line) {
                GuestLine::Check(sentence) => {
                    checks.next(sentence);
                    log.add("check", sentence);
                }
                GuestLine::Host(command) => {
                    let status = host.execute(&decode(command)?);
                    // The guest may have crashed meanwhile.
                    let _ = writeln!(answers, "{status}");
                }
                GuestLine::End(text) => status = text.parse().ok(),
                GuestLine::Else => {
                    is_begun |= line.starts_with("+ ");
                    log.add("guest", &line);
                }
            }
        }
        child.wait()?;
        let mut no_end = None;
        if status.is_none() {
            let console = std::fs::read(self.console()).unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            // One that boots from us may have been given wrong data.
            let is_ours = is_begun || source.is_disk() || source.is_network();
            no_end = why_there_is_no_end(&console, self.silence(), is_ours)
                .map(|why| format!("{why} in {}", checks.sentence));
            log.add("console", &console);
            log.add("host", &format!("the guest crashed, or was ended after {LIMIT:?}"));
        }
        Ok(ScriptResult { no_end, ..checks.end(status == Some(0)) })
    }

    /// Path of the kernel's console log.
    fn console(&self) -> PathBuf {
        self.log.with_extension("console")
    }

    /// For how long the guest's console has shown nothing.
    fn silence(&self) -> Duration {
        let shown = std::fs::metadata(self.console()).and_then(|file| file.modified());
        shown.ok().and_then(|time| time.elapsed().ok()).unwrap_or_default()
    }

    fn qemu(&self, script: &str, addresses: &Addresses) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--foreground", "--signal=KILL", &LIMIT.as_secs().to_string(), "qemu-system-x86_64"]);
        command.args(["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2", "-m", "1536"]);
        command.args(["-nographic", "-nodefaults", "-no-reboot"]);
        if shares_memory(script) {
            command.args(["-object", "memory-backend-memfd,id=memory,size=1536M,share=on"]);
            command.args(["-machine", "memory-backend=memory"]);
        }
        let (mut network, mut card) = (addresses.network(), "virtio-net-pci,netdev=net,romfile=");
        match KernelSource::of(script) {
            KernelSource::VhostUser => {
                command.args(["-chardev", "socket,id=boot,path=disk,reconnect=1"]);
                command.args(["-device", "vhost-user-blk-pci,chardev=boot,num-queues=2,bootindex=0"]);
            }
            KernelSource::Iscsi | KernelSource::Aoe => {
                // QEMU's DHCP server names the script, and its TFTP server has it.
                network += ",tftp=.,bootfile=boot.ipxe";
                card = "virtio-net-pci,netdev=net,bootindex=0";
                command.arg("-S");
            }
            KernelSource::Qemu => {
                command.arg("-kernel").arg(&self.kernel.image).arg("-initrd").arg(self.image);
                command.arg("-append").arg(parameters(script, addresses));
            }
        }
        command.arg("-serial").arg(format!("file:{}", self.console().display())).args(["-serial", "stdio"]);
        command.args(["-netdev", &network, "-device", card]);
        command.arg("-netdev").arg(addresses.rdma_network());
        command.args(["-device", "virtio-net-pci,netdev=rdma,romfile="]);
        if needs_frames(script) {
            // QEMU creates and removes the interface.
            command.arg("-netdev").arg(format!(
                "tap,id=frames,ifname={},script=no,downscript=no,vnet_hdr=off",
                addresses.tap()
            ));
            command.args(["-device", "virtio-net-pci,netdev=frames,romfile=,host_mtu=9000"]);
        }
        command
    }
}

/// The kernel's parameters. Those unknown to it are passed to the environment of its first process.
fn parameters(script: &str, addresses: &Addresses) -> String {
    let environment = addresses.environment().map(|(name, value)| format!("{name}={value}")).join(" ");
    // ib_srpt listens at IPv6's wildcard address if there is one; over siw that refuses IPv4.
    let ipv6 = if script.starts_with("srpt") { "ipv6.disable=1 " } else { "" };
    // On a busy machine Linux measures a wrong TSC frequency and reports soft lockups.
    format!(
        "console=ttyS0 quiet panic=-1 mitigations=off tsc=unstable clocksource=hpet no_timer_check \
         rcupdate.rcu_cpu_stall_suppress=1 nowatchdog random.trust_cpu=on audit=0 apparmor=0 {ipv6}GATEWAY={} \
         SCRIPT={script} {environment}",
        addresses.gateway()
    )
}

/// Whether a script needs raw frames, for which only root can create a tap interface.
pub(crate) fn needs_frames(script: &str) -> bool {
    script.starts_with("aoe") || KernelSource::of(script) == KernelSource::Aoe
}

/// Whether other processes of this machine access the guest's memory.
fn shares_memory(script: &str) -> bool {
    script.starts_with("vhost-user")
}

/// Addresses of host and guest, which are the same on both sides, so that addresses in discovery
/// responses work on the other side as well. They are loopback addresses, which other machines
/// cannot reach. Each run has its own addresses, so every run can use the default ports.
///
/// QEMU's network, 127.x.y.0/25, has the guest and a gateway. Through the gateway the guest
/// connects to any address that this machine can reach; Blockmux listens on 127.x.y.200. QEMU
/// listens at the guest's address on this machine and forwards connections to the guest.
struct Addresses {
    x: u32,
    y: u32,
}

impl Addresses {
    fn of_this_process() -> Addresses {
        let id = std::process::id();
        Addresses { x: 64 + id / 256 % 128, y: id % 256 }
    }

    fn host(&self) -> String {
        format!("127.{}.{}.200", self.x, self.y)
    }

    fn guest(&self) -> String {
        format!("127.{}.{}.15", self.x, self.y)
    }

    fn gateway(&self) -> String {
        format!("127.{}.{}.2", self.x, self.y)
    }

    /// Interface of the host that receives the guest's `eth2` frames.
    fn tap(&self) -> String {
        format!("bmxvm-{}-{}", self.x, self.y)
    }

    fn environment(&self) -> [(&'static str, String); 3] {
        [("HOST", self.host()), ("GUEST", self.guest()), ("TAP", self.tap())]
    }

    /// The network's QEMU option.
    fn network(&self) -> String {
        let (gateway, guest) = (self.gateway(), self.guest());
        let forward = PORTS.map(|port| format!("hostfwd=tcp:{guest}:{port}-{guest}:{port}")).join(",");
        format!("user,id=net,net=127.{}.{}.0/25,host={gateway},{forward}", self.x, self.y)
    }

    /// Network of the guest's second interface, which exists because Linux's RDMA does not use
    /// loopback addresses. Two addresses of this network forward, with one program per connection,
    /// to the iSCSI port of [`Addresses::host`] and to the next port: the two paths to one target.
    /// In the other direction, ports 3261 and 3262 of [`Addresses::guest`] forward to ports 3260
    /// and 3261 of the guest's address in this network.
    fn rdma_network(&self) -> String {
        let (host, guest) = (self.host(), self.guest());
        let forward = [0, 1].map(|nth| {
            let (address, port) = (RDMA_HOSTS[nth], ISCSI_PORT + nth as u16);
            format!("guestfwd=tcp:{address}:{ISCSI_PORT}-cmd:busybox nc {host} {port}")
        });
        let backward = [0, 1].map(|nth| {
            let port = ISCSI_PORT + nth;
            format!("hostfwd=tcp:{guest}:{}-{RDMA_GUEST}:{port}", port + 1)
        });
        let (forward, backward) = (forward.join(","), backward.join(","));
        format!("user,id=rdma,net=10.88.0.0/24,host=10.88.0.2,{forward},{backward}")
    }
}

/// A line of the script's output.
enum GuestLine<'a> {
    Check(&'a str),
    Host(&'a str),
    End(&'a str),
    Else,
}

impl GuestLine<'_> {
    fn parse(line: &str) -> GuestLine<'_> {
        match line.split_once(' ') {
            Some(("@check", sentence)) => GuestLine::Check(sentence),
            Some(("@host", command)) => GuestLine::Host(command),
            Some(("@end", status)) => GuestLine::End(status),
            _ => GuestLine::Else,
        }
    }
}

/// The current check of a script, which ends where the next one begins.
struct Checks<'a> {
    script: &'a str,
    say: &'a mut dyn FnMut(&str),
    sentence: String,
    began: Instant,
    passed: usize,
}

impl<'a> Checks<'a> {
    /// Creates the state for a script. Commands before the first check count as a check.
    fn new(script: &'a str, say: &'a mut dyn FnMut(&str)) -> Checks<'a> {
        Checks { script, say, sentence: "linux_boots".to_owned(), began: Instant::now(), passed: 0 }
    }

    fn next(&mut self, sentence: &str) {
        self.report("ok");
        self.passed += 1;
        (self.sentence, self.began) = (sentence.to_owned(), Instant::now());
    }

    fn end(mut self, passed: bool) -> ScriptResult {
        self.report(if passed { "ok" } else { "FAILED" });
        let checks = self.passed + usize::from(passed);
        ScriptResult { checks, passed, no_end: None }
    }

    fn report(&mut self, result: &str) {
        let seconds = self.began.elapsed().as_secs_f64();
        (self.say)(&format!("{result:<6} {seconds:5.1} s  {}::{}", self.script, self.sentence));
    }
}

/// Decodes base64, which the guest uses so that a command may have several lines.
fn decode(text: &str) -> Result<String> {
    succeed(Command::new("sh").args(["-c", "printf %s \"$1\" | base64 -d", "sh", text]))
}

/// What may have been the emulator's fault if a guest ended without the script's status, and
/// whether anything of ours had run. A guest that waits for us shows its [`HEARTBEAT`] meanwhile.
fn why_there_is_no_end(console: &str, silence: Duration, is_ours: bool) -> Option<&'static str> {
    // On a busy machine QEMU may execute a breakpoint that the kernel, which had set it to patch
    // its code, has already removed.
    if console.contains("Oops: int3") {
        return Some("QEMU failed to patch the guest's kernel");
    }
    // On a busy machine a kernel in QEMU has also failed while it set itself up.
    if !is_ours && console.contains("Kernel panic") {
        return Some("the guest's kernel crashed before the script began");
    }
    // QEMU's processors may wait for each other for ever.
    (silence > 5 * HEARTBEAT).then_some("the guest stood still")
}

/// How often `tests/vm/init` shows that the guest runs.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// Timeout of one script.
const LIMIT: Duration = Duration::from_secs(900);
/// Forwarded ports of the guest: iSCSI and NVMe/TCP.
const PORTS: [u16; 3] = [ISCSI_PORT, 4420, 4421];
const ISCSI_PORT: u16 = 3260;
/// Addresses of the host in the guest's RDMA network; the same as in `tests/vm/siw.inc`.
const RDMA_HOSTS: [&str; 2] = ["10.88.0.200", "10.88.0.201"];
/// The guest's address in its RDMA network.
const RDMA_GUEST: &str = "10.88.0.15";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_ends_at_the_next_one_and_the_last_one_has_the_result_of_the_script() {
        let mut lines = Vec::new();
        let mut say =
            |line: &str| lines.push(line.split_whitespace().next_back().unwrap().to_owned() + &line[..6]);
        let mut checks = Checks::new("a.sh", &mut say);
        checks.next("it_works");
        let outcome = checks.end(false);
        assert_eq!((outcome.checks, outcome.passed), (1, false));
        assert_eq!(lines, ["a.sh::linux_bootsok    ", "a.sh::it_worksFAILED"]);
    }

    #[test]
    fn a_guest_without_an_end_is_the_emulators_fault_if_nothing_of_ours_can_have_caused_it() {
        let panic = "Kernel panic - not syncing: Fatal exception";
        assert_eq!(why_there_is_no_end(panic, HEARTBEAT, true), None);
        assert_eq!(why_there_is_no_end("alive\nalive\n", HEARTBEAT, true), None);
        assert!(why_there_is_no_end(panic, HEARTBEAT, false).is_some());
        assert!(why_there_is_no_end("Oops: int3: 0000 [#1] PREEMPT SMP", HEARTBEAT, true).is_some());
        assert!(why_there_is_no_end("alive\n", 20 * HEARTBEAT, true).is_some());
    }

    #[test]
    fn commands_may_have_several_lines() {
        assert_eq!(decode("cnVuIGEKYg==").unwrap(), "run a\nb");
        assert!(matches!(GuestLine::parse("@host cnVu"), GuestLine::Host("cnVu")));
        assert!(matches!(GuestLine::parse("+ echo @check x"), GuestLine::Else));
    }

    #[test]
    fn guest_and_gateway_are_in_the_emulated_network_and_the_host_is_not() {
        let addresses = Addresses { x: 64, y: 7 };
        assert_eq!(addresses.host(), "127.64.7.200");
        let network = addresses.network();
        assert!(
            network
                .starts_with("user,id=net,net=127.64.7.0/25,host=127.64.7.2,hostfwd=tcp:127.64.7.15:3260-")
        );
    }
}
