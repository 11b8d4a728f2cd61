"""The method: types, laws, sampling, verification and the loop. numpy only."""
