//! Launches that another process runs in the emulator: the program that `FAKE_RUNNER` names.

use crate::{ILLEGAL_ADDRESS, State, Work};

impl State {
    /// Hands a launch over to the runner, with the memory, and takes the memory that it leaves.
    pub fn hand_over(&mut self, work: &Work, runner: &std::path::Path) {
        let words = |words: &mut dyn Iterator<Item = u64>| words.map(|w| format!("{w} ")).collect::<String>();
        let text = &self.modules[&work.module];
        let mut file = format!("{}\n", work.entry);
        file += &words(&mut work.shape.iter().map(|&n| n.into()));
        file += &format!("\n{}\n{}\n", words(&mut work.params.iter().copied()), text.len());
        for (address, memory) in &self.memory {
            file += &format!("{address} {}\n", memory.len());
        }
        let mut bytes = format!("{file}\n{text}").into_bytes();
        self.memory.values().for_each(|memory| bytes.extend(memory));
        let path = std::env::temp_dir().join(format!("fake-launch-{}-{}", std::process::id(), self.launches));
        std::fs::write(&path, bytes).unwrap();
        let mut command = std::process::Command::new(runner);
        command.args(["--exact", "runner"]).env("FAKE_LAUNCH", &path).env_remove("LD_LIBRARY_PATH");
        let output = command.output().unwrap();
        if output.status.success() {
            let bytes = std::fs::read(&path).unwrap();
            let mut rest = bytes.as_slice();
            for memory in self.memory.values_mut() {
                let (now, after) = rest.split_at(memory.len());
                memory.copy_from_slice(now);
                rest = after;
            }
        } else {
            // The cause is a failed test of the runner, which is on its standard output.
            let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            eprintln!("{}: {}\n{out}{err}", work.entry, output.status);
            self.poison = ILLEGAL_ADDRESS;
        }
        let _ = std::fs::remove_file(&path);
    }
}
