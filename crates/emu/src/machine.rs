//! The emulator as an implementation of [`Machine`].

use ptx::{Kernel, Machine};

use crate::report::{Options, Report};
use crate::{Buffer, EmuError, run};

/// The emulator as a [`Machine`]. A launch with hazards returns an error; its report is kept.
#[derive(Clone, Debug, Default)]
pub struct Emulator {
    options: Options,
    last: Option<Report>,
}

impl Emulator {
    /// An emulator that runs with these options.
    pub fn new(options: Options) -> Emulator {
        Emulator { options, last: None }
    }

    /// The report of the last launch that ran.
    pub fn last_report(&self) -> Option<&Report> {
        self.last.as_ref()
    }
}

impl Machine for Emulator {
    type Buffer = Buffer;
    type Error = EmuError;

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, EmuError> {
        Ok(Buffer::uninitialised(bytes))
    }

    fn upload(&mut self, buffer: &mut Buffer, data: &[u8]) -> Result<(), EmuError> {
        fits(buffer, data.len())?;
        buffer.write(data);
        Ok(())
    }

    fn launch(&mut self, kernel: &Kernel, buffers: &mut [&mut Buffer]) -> Result<(), EmuError> {
        let report = run(kernel, buffers, &self.options)?;
        let mut failures = report.hazards.iter().filter(|h| h.fails());
        let found =
            failures.next().map(|h| EmuError::Hazards { first: h.to_string(), count: 1 + failures.count() });
        self.last = Some(report);
        found.map_or(Ok(()), Err)
    }

    fn download(&mut self, buffer: &Buffer, data: &mut [u8]) -> Result<(), EmuError> {
        fits(buffer, data.len())?;
        let contents = buffer.to_bytes();
        data.copy_from_slice(&contents[..data.len()]);
        Ok(())
    }
}

fn fits(buffer: &Buffer, bytes: usize) -> Result<(), EmuError> {
    if bytes <= buffer.len() {
        return Ok(());
    }
    Err(EmuError::BufferSize { name: "(transfer)".into(), expected: bytes, given: buffer.len() })
}
