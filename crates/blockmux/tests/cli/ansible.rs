//! The role for Ansible in `contrib/ansible`, as the playbook of the documentation uses it: on this
//! machine, in a directory instead of its system's.

use crate::daemon::Daemon;
use crate::examples::pages;
use crate::program::{BLOCKMUX, has, succeed, text};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A machine that the role sets up: a directory.
struct Machine(TempDir);

impl Machine {
    /// Writes the playbook of the page, and the variables that lead it to this directory.
    fn new() -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        let pages = pages();
        let page = pages.iter().find(|page| page.name == "docs/guides/use-it-from.md").unwrap();
        let blocks = page.blocks();
        let playbook =
            blocks.iter().find(|block| block.lines[0] == "# storage.yml").unwrap().lines.join("\n");
        let playbook = playbook.replace("/var/lib/blockmux", machine.path("state").to_str().unwrap());
        fs::write(machine.path("storage.yml"), playbook.replace("192.0.2.1", "127.0.0.1:0")).unwrap();
        for directory in ["bin", "state", "units"] {
            fs::create_dir(machine.path(directory)).unwrap();
        }
        // A small program instead of one with debug information.
        let program = machine.path("built");
        fs::write(&program, format!("#!/bin/sh\nexec '{BLOCKMUX}' \"$@\"\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let variables = json!({
            "ansible_connection": "local",
            "ansible_python_interpreter": "/usr/bin/python3",
            "blockmux_binary": program,
            "blockmux_program": machine.path("bin/blockmux"),
            "blockmux_user": rustix::process::geteuid().as_raw().to_string(),
            "blockmux_config_directory": machine.path("config"),
            "blockmux_state_directory": machine.path("state"),
            "blockmux_control": format!("unix:{}", machine.path("control").display()),
            "blockmux_unit_directory": machine.path("units"),
            "blockmux_start": false,
            "blockmux_settings": {"idle_timeout": 3600},
        });
        fs::write(machine.path("variables.json"), variables.to_string()).unwrap();
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the playbook; returns its output.
    fn play(&self, options: &[&str]) -> String {
        let roles = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/ansible/roles");
        let mut command = Command::new("ansible-playbook");
        command.args(["-i", "storage,", "-e", "@variables.json", "storage.yml"]).args(options);
        command.current_dir(self.0.path()).env("ANSIBLE_ROLES_PATH", roles.canonicalize().unwrap());
        command.env("ANSIBLE_HOME", self.path("ansible")).env("ANSIBLE_LOCAL_TEMP", self.path("ansible"));
        succeed(command.env("LC_ALL", "C.UTF-8").env("ANSIBLE_NOCOLOR", "1"))
    }

    /// The names of the tasks that have changed something.
    fn changed(&self, options: &[&str]) -> Vec<String> {
        let said = self.play(options);
        let mut changed = Vec::new();
        for task in said.split("\nTASK [blockmux : ").skip(1) {
            let (name, results) = task.split_once(']').unwrap();
            if results.lines().any(|line| line.starts_with("changed: ")) {
                changed.push(name.to_owned());
            }
        }
        changed
    }

    fn ctl(&self, arguments: &[&str]) -> String {
        let control = format!("unix:{}", self.path("control").display());
        succeed(Command::new(BLOCKMUX).args(["ctl", &control]).args(arguments))
    }
}

#[test]
fn the_role_installs_and_configures_a_daemon_and_a_second_run_changes_nothing() {
    if !has("ansible-playbook") {
        return;
    }
    let machine = Machine::new();
    machine.play(&["--tags", "install,service"]);
    let config = machine.path("config/blockmux.toml");
    let mut command = Command::new(machine.path("bin/blockmux"));
    command.args(["serve", "--json", "--config"]).arg(&config);
    let daemon =
        Daemon::spawn_in(tempfile::tempdir().unwrap(), command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let objects = "Configure volumes and targets";
    assert_eq!(machine.changed(&["--check"]), [objects], "of everything else there is nothing to do");
    let volumes = machine.ctl(&["list", "volume", "--json"]);
    assert!(volumes.contains("\"items\":[]"), "a check changes nothing: {volumes}");
    assert_eq!(machine.changed(&[]), [objects, "Save what has changed"]);
    let target = "iqn.2026-11.com.example:storage";
    let shown: Value =
        serde_json::from_str(&machine.ctl(&["show", "iscsi-target", target, "--json"])).unwrap();
    assert_eq!(
        (&shown["luns"]["0"], &shown["acl"][0]["InitiatorName"]),
        (&json!("root"), &json!("iqn.1993-08.org.debian:01:host1"))
    );
    let limits: Value = serde_json::from_str(&machine.ctl(&["show", "volume", "root", "--json"])).unwrap();
    assert_eq!(limits["limits"]["iops"], 5000);
    assert_eq!(machine.changed(&[]), [] as [&str; 0], "a second run");
    // Somebody changes a key: the role changes it back, and says so in a check.
    machine.ctl(&["set", "volume", "root", "limits.iops=7"]);
    let checked = machine.play(&["--check", "--diff"]);
    assert!(checked.contains("\n+~ volume root: limits: iops: 7 -> 5000\n"), "{checked}");
    assert_eq!(machine.changed(&[]), [objects], "the file has it already");
    let saved = fs::read_to_string(&config).unwrap();
    assert!(saved.contains("iops = 5000") && saved.contains("idle_timeout = 3600"), "{saved}");
    drop(daemon);
}

#[test]
fn the_unit_of_the_role_starts_the_program_and_may_save() {
    if !has("ansible-playbook") || !has("systemd-analyze") {
        return;
    }
    let machine = Machine::new();
    machine.play(&["--tags", "install,service"]);
    let unit = machine.path("units/blockmux.service");
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output().unwrap();
    assert!(verified.status.success(), "{}", text(&verified.stderr));
    let drop_in = fs::read_to_string(machine.path("units/blockmux.service.d/ansible.conf")).unwrap();
    let (program, config) = (machine.path("bin/blockmux"), machine.path("config"));
    assert!(drop_in.contains(&format!("\nExecStart={} ", program.display())), "{drop_in}");
    assert!(drop_in.contains(&format!("\nReadWritePaths={}\n", config.display())), "{drop_in}");
}
