"""What a shard takes: the bounds on rows and on each row, and why one is refused."""

from dataclasses import dataclass

from loralane_server.errors import InvalidRequest, Overloaded
from loralane_server.kv.pages import pages_for
from loralane_server.rows import Admission


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed when the shard starts."""

    #: Rows that run at once.
    rows: int
    #: Tokens of a row, prompt and generated together.
    length: int
    #: Token ids are below this.
    vocab: int
    #: Tokens that one step computes: streams first, and what is left is the bound on a chunk.
    step_tokens: int
    #: At which depth of a prompt a token costs twice what the first does; None = never.
    doubling: int | None = None

    def check(self, admission: Admission, running: int, pages: int) -> None:
        """Raise `InvalidRequest` for what can never run, `Overloaded` for one row too many.

        running: rows that there are; pages: KV pages of the shard, free or not.
        """
        total = len(admission.prompt) + admission.max_tokens
        if not admission.prompt or admission.max_tokens < 1:
            raise InvalidRequest("a prompt of at least one token and max_tokens >= 1 are needed")
        biased = (token for token, _ in admission.sampling.logit_bias)
        if max((*admission.prompt, *biased)) >= self.vocab:
            raise InvalidRequest(f"token ids must be below {self.vocab}, in logit_bias too")
        if total > self.length:
            raise InvalidRequest(
                f"prompt ({len(admission.prompt)}) + max_tokens ({admission.max_tokens}) is "
                f"{total} tokens, the limit is {self.length}"
            )
        if pages_for(total) > pages:
            raise InvalidRequest(
                f"prompt and max_tokens are {total} tokens in {pages_for(total)} KV pages, this "
                f"shard has {pages}; lower max_tokens or start the shard with more --kv-memory"
            )
        if running >= self.rows:
            raise Overloaded(f"all {self.rows} rows are taken")
