#!/usr/bin/python
"""Ansible module: one object of the config of a running Blockmux daemon, by `blockmux ctl`."""

import json

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: blockmux_object
short_description: Volumes, targets and other objects of a running Blockmux daemon
description:
  - Adds, changes or removes one object of the config by C(blockmux ctl).
  - Keys that are not given keep their values.
  - C(blockmux ctl save) writes the changes into the daemon's config file.
options:
  path:
    description: Kind and name of the object, and for an entry of a target also its list and its name there.
    type: list
    elements: str
    required: true
  set:
    description: Keys of the object with their values, as in the config file; null removes a key.
    type: dict
    default: {}
  state:
    description: Whether the object exists.
    choices: [present, absent]
    default: present
  force:
    description: Change and remove also what sessions use.
    type: bool
    default: false
  control:
    description: Address of the daemon's control socket.
    type: str
    default: unix:/run/blockmux/control
  program:
    description: Path of blockmux.
    type: str
    default: blockmux
"""

EXAMPLES = r"""
- blockmux_object:
    path: [volume, root]
    set: {spec: "block:/dev/vg0/root", limits: {iops: 5000}}
- blockmux_object:
    path: [iscsi-target, "iqn.2026-11.com.example:storage", luns, "0"]
    set: {volume: root}
"""

RETURN = r"""
changes:
  description: What has changed, or would, one line each.
  returned: always
  type: list
  elements: str
"""


class Daemon:
    """Runs `blockmux ctl`."""

    def __init__(self, module):
        self.module = module
        self.path = module.params["path"]

    def ctl(self, command, *arguments):
        """The exit status, standard output and standard error of a command for the object."""
        program, control = self.module.params["program"], self.module.params["control"]
        return self.module.run_command([program, "ctl", control, command, "--json", *arguments, *self.path])

    def exists(self):
        status, _, error = self.ctl("show")
        if status != 0 and "does not exist" not in error:
            self.fail(error)
        return status == 0

    def change(self, command, keys=(), is_dry=False):
        """Executes a change and returns it as lines of text."""
        options = ["--dry-run"] if is_dry else []
        options += ["--force"] if self.module.params["force"] else []
        words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys]
        path, self.path = self.path, [*self.path, *words]
        status, output, error = self.ctl(command, *options)
        self.path = path
        if status != 0:
            self.fail(error)
        return [one["change"] for one in json.loads(output)["changes"]]

    def fail(self, error):
        self.module.fail_json(msg=error.strip() or "blockmux ctl has failed", path=self.path)


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "list", "elements": "str", "required": True},
            "set": {"type": "dict", "default": {}},
            "state": {"choices": ["present", "absent"], "default": "present"},
            "force": {"type": "bool", "default": False},
            "control": {"type": "str", "default": "unix:/run/blockmux/control"},
            "program": {"type": "str", "default": "blockmux"},
        },
        supports_check_mode=True,
    )
    daemon, keys = Daemon(module), sorted(module.params["set"].items())
    is_present, exists = module.params["state"] == "present", daemon.exists()
    changes = []
    if is_present and not exists:
        # What it refers to may be added by a task before this one, and in check mode it was not.
        changes = [f"+ {' '.join(daemon.path)}"] if module.check_mode else daemon.change("add", keys)
    elif is_present and keys:
        changes = daemon.change("set", keys, is_dry=True)
        if changes and not module.check_mode:
            daemon.change("set", keys)
    elif exists and not is_present:
        changes = daemon.change("remove", is_dry=module.check_mode)
    after = "".join(f"{line}\n" for line in changes)
    module.exit_json(changed=bool(changes), changes=changes, diff={"before": "", "after": after})


if __name__ == "__main__":
    main()
