"""What people serve with today, as a serve plan: command lines and scripts of the engines, configurations, Dynamo's manifests.

server_commands    the commands that start servers, out of a script or a manifest, with their settings under one name each
server_layouts     what the settings of each engine say of layout, precision, options and speculation
serve_reading      all of it with what the user adds, as a plan; what decides time or memory and stands nowhere is asked
"""
