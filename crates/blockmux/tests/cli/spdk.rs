//! Programs of SPDK.
//!
//! `BLOCKMUX_SPDK` names a directory with an SPDK build; otherwise they have to be on `PATH`. A
//! test that lacks its program prints a line that begins with `skipped: ` and ends. Tests control
//! SPDK by its JSON-RPC socket.

use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A program of SPDK without any configuration; killed when dropped.
pub(crate) struct Spdk {
    child: Child,
    rpc: UnixStream,
    pub(crate) files: TempDir,
}

/// The command that runs a program of SPDK, or `None` after the reason for a skipped test.
#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
fn program(name: &str) -> Option<Command> {
    if let Some(build) = std::env::var_os("BLOCKMUX_SPDK").map(PathBuf::from) {
        let mut command = Command::new(build.join("build/bin").join(name));
        command.env("LD_LIBRARY_PATH", build.join("build/lib"));
        return Some(command);
    }
    let places = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&places).any(|place| place.join(name).is_file()) {
        return Some(Command::new(name));
    }
    println!("skipped: no {name}; set BLOCKMUX_SPDK to the directory of an SPDK build");
    None
}

impl Spdk {
    /// Starts a program with further arguments, in which `DIR` stands for the directory `files`;
    /// `None` if it is not installed.
    pub(crate) fn start(name: &str, args: &[&str]) -> Option<Spdk> {
        let mut command = program(name)?;
        let files = tempfile::tempdir().unwrap();
        let socket = files.path().join("rpc");
        let log = fs::File::create(files.path().join("log")).unwrap();
        command
            .args([
                "--no-huge",
                "-s",
                "512",
                "-m",
                "0x1",
                "--no-pci",
                "--disable-cpumask-locks",
                "--iova-mode",
                "va",
                "-r",
            ])
            .arg(&socket)
            .args(args.iter().map(|arg| arg.replace("DIR", &files.path().display().to_string())));
        let mut child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let rpc = loop {
            if let Ok(rpc) = UnixStream::connect(&socket) {
                break rpc;
            }
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{name}: {status}: {}", fs::read_to_string(files.path().join("log")).unwrap());
            }
            std::thread::park_timeout(Duration::from_millis(50));
        };
        let mut spdk = Spdk { child, rpc, files };
        spdk.call("framework_wait_init", json!({}));
        Some(spdk)
    }

    /// The answer to a remote procedure call, or its error.
    pub(crate) fn try_call(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        let mut request = json!({"jsonrpc": "2.0", "id": 1, "method": method});
        if params != json!({}) {
            request["params"] = params;
        }
        self.rpc.write_all(request.to_string().as_bytes()).unwrap();
        let (mut said, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            let len = self.rpc.read(&mut piece).unwrap();
            assert!(len > 0, "{method}: SPDK ended: {}", self.log());
            said.extend(&piece[..len]);
            let Ok(mut answer) = serde_json::from_slice::<Value>(&said) else { continue };
            return match answer.get("error") {
                Some(error) => Err(error.clone()),
                None => Ok(answer["result"].take()),
            };
        }
    }

    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        let answer = self.try_call(method, params);
        answer.unwrap_or_else(|error| panic!("{method}: {error}: {}", self.log()))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.files.path().join("log")).unwrap()
    }
}

impl Drop for Spdk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
