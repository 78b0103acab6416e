"""Has a program run by server.py, and ends as it ends: NAME-OF-SERVER PROGRAM ARGUMENTS."""

import marshal
import os
import signal
import socket
import struct
import sys

PASSED_ON = "SIGHUP SIGINT SIGQUIT SIGTERM SIGUSR1 SIGUSR2".split()

server = socket.socket(socket.AF_UNIX)
server.connect("\0" + sys.argv[1])
request = marshal.dumps((os.getcwdb(), sys.argv[2:], dict(os.environb)))
socket.send_fds(server, [struct.pack("I", len(request))], [0, 1, 2])
server.sendall(request)
for name in PASSED_ON:
    signal.signal(getattr(signal, name), lambda number, _: server.send(bytes([number])))
(status,) = struct.unpack("i", server.recv(4, socket.MSG_WAITALL))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
