//! Reads the value of `--device`.

use std::str::FromStr;

use crate::error::CliError;

/// The device to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// A GPU by its number, counted from 0.
    Cuda(i32),
    /// The first GPU if there is one, else the CPU.
    Auto,
}

impl FromStr for Device {
    type Err = CliError;

    fn from_str(text: &str) -> Result<Device, CliError> {
        let refuse = || CliError::Argument {
            argument: "--device",
            value: text.to_owned(),
            accepted: "cpu, cuda, cuda:N, auto".into(),
        };
        match text {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            "auto" => Ok(Device::Auto),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|n| n.parse::<u16>().ok());
                ordinal.map(|n| Device::Cuda(n.into())).ok_or_else(refuse)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_as_written() {
        let parse = |text: &str| text.parse::<Device>().ok();
        assert_eq!(parse("cuda:3"), Some(Device::Cuda(3)));
        assert_eq!((parse("cpu"), parse("auto")), (Some(Device::Cpu), Some(Device::Auto)));
        assert_eq!((parse("cuda:-1"), parse("gpu"), parse("cuda:")), (None, None, None));
    }
}
