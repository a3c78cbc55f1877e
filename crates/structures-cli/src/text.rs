//! Between text and token ids.

use std::path::Path;

use anyhow::{Result, anyhow};
use tokenizers::Tokenizer;

/// A checkpoint's tokenizer.
pub struct Text {
    tokenizer: Tokenizer,
}

impl Text {
    /// Reads `tokenizer.json` of a checkpoint.
    pub fn load(model: &Path) -> Result<Self> {
        let path = model.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path)
            .map_err(|error| anyhow!("{}: {}", path.display(), one_line(&error)))?;
        Ok(Text { tokenizer })
    }

    /// The token ids of a text, without special tokens around them.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, false).map_err(|error| anyhow!(one_line(&error)))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of token ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, false).map_err(|error| anyhow!(one_line(&error)))
    }

    /// Turns tokens into text one at a time; see [`Streamed`].
    pub fn stream(&self) -> Streamed<'_> {
        Streamed { text: self, ids: Vec::new(), printed: 0 }
    }
}

/// Text as it comes: a token may end in the middle of a character, which is held back until the character is whole.
pub struct Streamed<'a> {
    text: &'a Text,
    ids: Vec<u32>,
    printed: usize,
}

impl Streamed<'_> {
    /// The text that one more token completes.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.text.decode(&self.ids)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let new = text.get(self.printed..).unwrap_or_default().to_string();
        self.printed = text.len();
        Ok(new)
    }

    /// The text held back at the end.
    pub fn rest(&self) -> Result<String> {
        Ok(self.text.decode(&self.ids)?.get(self.printed..).unwrap_or_default().to_string())
    }
}

fn one_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().replace('\n', " ")
}
